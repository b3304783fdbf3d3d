"""`quire generate MODEL [PROMPT ...]`: continue prompts."""

import argparse
import json
import sys

from quire import LLM, EngineConfig, SamplingParams
from quire.cli import engine_knobs, sampling_knobs


def run(args: argparse.Namespace) -> int:
    """Continue every prompt and print it with its continuation."""
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts or not all(prompts):
        raise ValueError("PROMPT is empty: give text as an argument, or lines on standard input")
    params = SamplingParams(**sampling_knobs(args))
    knobs = engine_knobs(args)
    # Fewer rows than the engine's default mean fewer programs to compile.
    knobs["max_num_seqs"] = knobs["max_num_seqs"] or min(len(prompts), EngineConfig.max_num_seqs)
    with LLM(args.model, **knobs) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            completion = output.outputs[0]
            if args.json:
                shown = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
                print(json.dumps(shown | {"token_ids": completion.token_ids}, ensure_ascii=False))
            else:
                print(f"{prompt}{completion.text}\n")
    return 0
