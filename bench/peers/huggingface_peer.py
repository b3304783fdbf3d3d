"""Hugging Face transformers: one batched `generate`, bfloat16, KV cache on. Run by `run huggingface MODEL.gguf`."""

import argparse

import protocol
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

ATTENTION = "sdpa"


class TokenClock(BaseStreamer):
    """`generate` hands it the prompt first and then one token for each row at a time."""

    def __init__(self, num_rows: int):
        self.clock = protocol.Clock(num_rows)
        self.saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self.saw_prompt:
            self.saw_prompt = True
            return
        for row, token in enumerate(value.tolist()):
            self.clock.add(row, [token])

    def end(self) -> None:
        pass


def load(args: argparse.Namespace) -> protocol.Peer:
    torch.set_num_threads(protocol.NUM_THREADS)
    torch.set_grad_enabled(False)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, attn_implementation=ATTENTION, local_files_only=True
    ).eval()
    # Nothing ends a row early. Padding is masked, so its token only has to exist.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new_tokens: int, stream: bool) -> protocol.Answer:
        width = max(len(prompt) for prompt in prompts)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        streamer = TokenClock(len(prompts)) if stream else None
        output = model.generate(
            padded, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, use_cache=True, streamer=streamer
        )
        if streamer is not None:
            return streamer.clock.answer()
        return protocol.Answer(output[:, width:].tolist())

    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    settings = {"dtype": "bfloat16", "threads": protocol.NUM_THREADS, "attention": ATTENTION}
    return protocol.Peer(generate, version, settings)


if __name__ == "__main__":
    protocol.serve(load, __doc__)
