"""A LangChain chain on a Quire server: a prompt, the model, a typed answer.

quire serve MODEL --served-model-name smollm2 --port 8000
python examples/langchain_chain.py [URL]      (needs langchain-openai; URL is http://127.0.0.1:8000/v1 by default)
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = ChatOpenAI(base_url=URL, api_key="none", model="smollm2", temperature=0, max_tokens=48)


class Capital(BaseModel):
    """What is wanted of an answer."""

    city: str
    country: str


prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
chain = prompt | model | StrOutputParser()
print("one:   ", chain.invoke({"country": "France"}))
print("batch: ", chain.batch([{"country": "Italy"}, {"country": "Japan"}]))
print("stream:", end=" ")
for text in chain.stream({"country": "Spain"}):
    print(text, end="", flush=True)
print()
typed = prompt | model.with_structured_output(Capital, method="json_schema")
print("typed: ", repr(typed.invoke({"country": "France"})))
