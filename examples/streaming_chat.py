"""A chat that prints each answer while it is written, and remembers what was said.

python examples/streaming_chat.py [MODEL] [MESSAGE ...]
"""

import sys

from quire import LLM, SamplingParams

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = sys.argv[2:] or ["What is the capital of France?", "And of Italy?"]

with LLM(MODEL, dtype="float32", max_model_len=1024, max_num_seqs=1) as llm:
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        answer = ""
        # The prompt is the whole conversation; the pages of its earlier part are found in the prefix cache.
        for chunk in llm.stream(llm.chat_prompt(messages), SamplingParams(temperature=0, max_tokens=48)):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
        print("\n")
        messages.append({"role": "assistant", "content": answer})
