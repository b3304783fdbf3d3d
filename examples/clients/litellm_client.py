"""LiteLLM. Start `quire serve MODEL --served-model-name smollm2` first."""

import json
import sys

import litellm
from pydantic import BaseModel

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
# `openai/` stands for any server that speaks OpenAI's API; `hosted_vllm/` would drop parts of a tool's schema.
server = {"model": "openai/smollm2", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 32}
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]

# A chat
chat = litellm.completion(messages=messages, **server)
print("chat:", chat.choices[0].message.content)

# A stream
print("stream: ", end="")
for chunk in litellm.completion(messages=messages, stream=True, **server):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()


# Structured output
class City(BaseModel):
    name: str
    country: str


parsed = litellm.completion(messages=messages, response_format=City, **server)
print("structured:", City.model_validate_json(parsed.choices[0].message.content))

# A tool: the model asks for a call, the client makes it, the model answers
weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = litellm.completion(messages=messages, tools=[weather], tool_choice="required", **server).choices[0].message
call = asked.tool_calls[0]
print("tool:", call.function.name, json.loads(call.function.arguments))
messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees, sunny"}]
print("answer:", litellm.completion(messages=messages, **server).choices[0].message.content)
