"""LangChain, by `langchain-openai`. Start `quire serve MODEL --served-model-name smollm2` first."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
llm = ChatOpenAI(base_url=url, api_key="none", model="smollm2", temperature=0, max_tokens=32)
question = "What is the capital of France? Answer in one sentence."

# A chat
print("chat:", llm.invoke(question).content)

# A stream
print("stream: ", end="")
for chunk in llm.stream(question):
    print(chunk.content, end="", flush=True)
print()


# Structured output
class City(BaseModel):
    name: str
    country: str


print("structured:", llm.with_structured_output(City, method="json_schema").invoke(question))


# A tool: the model asks for a call, the client makes it, the model answers
@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"18 degrees and sunny in {city}"


messages = [HumanMessage("What is the weather in Paris?")]
asked = llm.bind_tools([get_weather], tool_choice="required", strict=True).invoke(messages)
call = asked.tool_calls[0]
print("tool:", call["name"], call["args"])
messages += [asked, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
print("answer:", llm.invoke(messages).content)

# The same over /v1/responses
responses = ChatOpenAI(
    base_url=url, api_key="none", model="smollm2", temperature=0, use_responses_api=True, store=False
)
print("responses:", responses.invoke(question, max_tokens=32).text)
