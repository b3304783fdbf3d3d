"""Records out of prose: the answer is always JSON that the schema allows, whatever the model would have liked to say.

python examples/structured_extraction.py [MODEL]      (needs quire-llm[structured])
"""

import json
import sys

from quire import LLM, SamplingParams, Structured

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    "Ada Lovelace was born in London in 1815 and wrote the first program.",
    "Alan Turing, born 1912 in Maida Vale, broke codes at Bletchley Park.",
    "Grace Hopper was born in New York City in 1906 and wrote the first compiler.",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "place": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "born", "place"],
    "additionalProperties": False,
}
EXAMPLE = (
    "Text: Marie Curie was born in Warsaw in 1867 and discovered radium.\n"
    'JSON: {"name": "Marie Curie", "born": 1867, "place": "Warsaw"}\n\n'
)

with LLM(MODEL, dtype="float32", max_model_len=512, max_num_seqs=4) as llm:
    params = SamplingParams(temperature=0, max_tokens=64, structured=Structured(json_schema=PERSON))
    for out in llm.generate([f"{EXAMPLE}Text: {text}\nJSON:" for text in TEXTS], params):
        if out.outputs[0].finish_reason == "length":
            print(f"cut before its end, raise max_tokens: {out.outputs[0].text}")
            continue
        person = json.loads(out.outputs[0].text)
        print(f"{person['name']}, born {person['born']} in {person['place']}")
