"""Quire of any checkout, named by PYTHONPATH; `bench/versions.py` compares two of them.

The checkout needs the native library in its place.
"""

import argparse

import protocol

import quire


def load(args: argparse.Namespace) -> protocol.Peer:
    """Open the model; every turn begins with an empty prefix cache."""
    llm = quire.LLM(args.model, max_num_seqs=args.max_rows, max_model_len=args.max_len, quiet=True)

    def generate(prompts: list[list[int]], new_tokens: int, stream: bool) -> protocol.Answer:
        del stream
        llm.engine.clear_prefix_cache()
        params = quire.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, progress=False)
        return protocol.Answer([output.outputs[0].token_ids for output in outputs])

    return protocol.Peer(generate, quire.__version__, {"path": quire.__file__})


if __name__ == "__main__":
    protocol.serve(load, __doc__)
