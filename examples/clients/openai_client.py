"""The `openai` package. Start `quire serve MODEL --served-model-name smollm2` first."""

import json
import sys

import openai
from pydantic import BaseModel

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = openai.OpenAI(base_url=url, api_key="none")
model = "smollm2"
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

# A chat
chat = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
print("chat:", chat.choices[0].message.content)

# A stream
print("stream: ", end="")
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()


# Structured output
class City(BaseModel):
    name: str
    country: str


parsed = client.chat.completions.parse(
    model=model, messages=messages, response_format=City, max_tokens=64, temperature=0
)
print("structured:", parsed.choices[0].message.parsed)

# A tool: the model asks for a call, the client makes it, the model answers
weather = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
items = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = client.responses.create(
    model=model, input=items, tools=[weather], tool_choice="required", max_output_tokens=64, temperature=0
)
call = asked.output[0]
print("tool:", call.name, json.loads(call.arguments))
items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}]
answer = client.responses.create(model=model, input=items, max_output_tokens=32, temperature=0)
print("answer:", answer.output_text)
