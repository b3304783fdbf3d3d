"""One process of a group, for tests: process 0 generates and prints what it got, the others follow.

python -m tests.distributed.program MODEL '{"mesh": "model=2", "num_processes": 2, "process_id": 0, ...}'
"""

import json
import sys
from typing import Any

import numpy as np

from quire import LLM, SamplingParams, follow

PROMPTS = ["The capital of France is", "a quire is a gathering of pages, and", "x", "pages " * 6, "once more"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True, n=3, top_p=0.9)
SMALL = {
    "dtype": "float32",
    "page_size": 4,
    "num_pages": 24,
    "num_host_pages": 24,
    "preemption": "swap",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "debug": True,
}
"""Too few pages for all rows, so that some are swapped out."""


def tokens(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, progress=False)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def generate(llm: LLM) -> dict[str, Any]:
    """What must be the same in any number of processes."""
    found = {"greedy": tokens(llm, GREEDY), "seeded": tokens(llm, SEEDED)}
    assert llm.engine.stats().swaps > 0
    return found


def change_weights(llm: LLM, model: str) -> dict[str, Any]:
    """Tokens after every command that a runner has."""
    from safetensors.numpy import load_file

    tensors = load_file(f"{model}/model.safetensors")
    found: dict[str, Any] = {}
    llm.set_weights({name: tensor * np.float32(1.25) for name, tensor in tensors.items()})
    found["changed"] = tokens(llm, GREEDY)
    llm.sleep()
    llm.wake()
    found["woken"] = tokens(llm, GREEDY)
    llm.engine.zero_cache()
    found["zeroed"] = tokens(llm, GREEDY)
    assert llm.engine.stats().compiles_after_warmup == 0
    return found


def main(model: str, knobs: dict[str, Any]) -> None:
    if knobs.get("process_id"):
        follow(model, quiet=True, **knobs)
        return
    with LLM(model, quiet=True, **knobs) as llm:
        found = generate(llm)
        if not model.endswith(".gguf"):
            found |= change_weights(llm, model)
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
