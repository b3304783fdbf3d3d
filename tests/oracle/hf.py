"""The oracle: Hugging Face transformers, one sequence at a time and on one thread each, in float32 on the CPU.

A script of its own, run by `.oracle/bin/python` (see `.ci/oracle-env`); it must never import quire, so that
an error of ours cannot be on both sides of a comparison. `tests/oracle/harness.py` starts it.

    hf.py smollm2 MODEL.gguf OUT_DIR                    the GGUF file as a Hugging Face folder in float32
    hf.py checkpoints OUT_DIR                           tiny seeded random checkpoints, one folder each
    hf.py greedy MODEL_DIR REQUESTS.json OUT.json       [{"prompt": [ids], "max_tokens": n}]
                                                     -> [{"tokens": [n], "gaps": [n], "runners_up": [n]}]
    hf.py logits MODEL_DIR REQUESTS.json OUT.npz        [{"tokens": [ids], "prefill": n}]
                                                     -> "0", "1", ...: float32 [tokens, vocabulary]
    hf.py logprobs MODEL_DIR REQUESTS.json OUT.json     [{"tokens": [ids]}] -> [{"logprobs": [tokens - 1]}]

Greedy never stops at an end-of-sequence token. `gaps` is the best logit minus the second best, whose token is
in `runners_up`. Logprob i is that of token i + 1 given tokens 0..i. Progress goes to stderr.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SEED = 20240229

# One thread a process: with two, about one process in fifty computes the second thread's half of a prompt with errors
# near 1e-3 of the logits, all through its life (seen on torch 2.13 on x86; never with one).
NUM_PROCESSES = 2

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Large enough to show in the logits when it is left out: embeddings have a variance of 0.25.
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def rope(theta: float, kind: str = "default", **scaling) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **scaling}


# With heads of 16 and theta 5e5 the wavelengths are 6, 32, 167, 862, ... tokens: around 64 original positions
# they reach all three branches of llama3 scaling (kept below 16, blended up to 64, divided above).
LLAMA3_ROPE = rope(
    5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

CHECKPOINTS: dict[str, PretrainedConfig] = {
    "llama2": LlamaConfig(**TINY | {"num_key_value_heads": 4}, rope_parameters=rope(1e4)),
    "llama3": LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "llama-linear": LlamaConfig(**TINY, rope_parameters=rope(1e4, "linear", factor=4.0)),
    "mistral": MistralConfig(**TINY, sliding_window=24, rope_parameters=rope(1e4)),
    "mistral-headdim": MistralConfig(**TINY, sliding_window=None, head_dim=24, rope_parameters=rope(1e6)),
    "qwen2": Qwen2Config(**TINY | {"tie_word_embeddings": True}, rope_parameters=rope(1e6)),
    # Layers from max_window_layers on have the window: here 2 and 3.
    "qwen2-window": Qwen2Config(
        **TINY | {"num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
        rope_parameters=rope(1e4),
    ),
    "qwen3": Qwen3Config(**TINY | {"num_attention_heads": 6}, head_dim=32, rope_parameters=rope(1e6)),
}


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load(model_dir: Path) -> PreTrainedModel:
    # Eager attention masks with the plain rule `position - window < key <= position`, one softmax in float32.
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


class Sequence:
    """One sequence and its KV cache. `feed` appends tokens and returns the logits at each of them."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.cache = DynamicCache(config=model.config)

    def feed(self, tokens: list[int], last_only: bool = False) -> torch.Tensor:
        logits = self.model(
            input_ids=torch.tensor([tokens]),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        ).logits[0]
        if not torch.isfinite(logits).all():
            raise FloatingPointError(f"logits are not finite after {self.cache.get_seq_length()} tokens")
        return logits


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> dict:
    sequence = Sequence(model)
    tokens, gaps, runners_up = [], [], []
    logits = sequence.feed(prompt, last_only=True)[-1]
    while True:
        (best, second), (token, runner_up) = (pair.tolist() for pair in logits.topk(2))
        tokens.append(token)
        gaps.append(best - second)
        runners_up.append(runner_up)
        if len(tokens) == max_tokens:
            return {"tokens": tokens, "gaps": gaps, "runners_up": runners_up}
        logits = sequence.feed([token])[-1]


def logits(model: PreTrainedModel, tokens: list[int], prefill: int) -> np.ndarray:
    sequence = Sequence(model)
    parts = [sequence.feed(tokens[:prefill])]
    parts += [sequence.feed([token]) for token in tokens[prefill:]]
    return torch.cat(parts).numpy()


def logprobs(model: PreTrainedModel, tokens: list[int]) -> dict:
    logits = Sequence(model).feed(tokens)[:-1].double()
    chosen = logits.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    return {"logprobs": (chosen - logits.logsumexp(1)).tolist()}


RUN = {"greedy": greedy, "logits": logits, "logprobs": logprobs}


def answer(command: str, model_dir: Path, requests_path: Path, out: Path) -> None:
    """Runs every request of the file, each in one of a few processes, and writes the answers in the same order."""
    requests = json.loads(requests_path.read_text())
    results, start = [], time.monotonic()
    with ProcessPoolExecutor(
        min(NUM_PROCESSES, len(requests)), initializer=start_worker, initargs=(model_dir,)
    ) as pool:
        for result in pool.map(answer_one, [command] * len(requests), requests):
            results.append(result)
            log(f"{command} {len(results)}/{len(requests)}: {time.monotonic() - start:.1f} s")
    if command == "logits":
        np.savez(out, **{str(i): array for i, array in enumerate(results)})
    else:
        out.write_text(json.dumps(results))


def start_worker(model_dir: Path) -> None:
    global model
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = load(model_dir)


def answer_one(command: str, request: dict):
    return RUN[command](model, **request)


def write_smollm2(gguf: Path, out_dir: Path) -> None:
    """Converts by transformers' own GGUF reader, which undoes llama.cpp's order of q and k rows itself."""
    source = {
        "gguf": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    source_path = out_dir / "source.json"
    if source_path.exists() and json.loads(source_path.read_text()) == source:
        log(f"{out_dir} is complete")
        return
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir(parents=True)

    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Its weights are plain float32 by now, but transformers refuses to save a model it once read from GGUF.
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers ignores tokenizer.ggml.pre; "smollm" means single digits, then bytes, no leading space.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )

    # Rows of q and k left in the wrong order still give fluent-looking logits, but not this answer.
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False)
    said = tokenizer.decode(greedy(model, prompt, 2)["tokens"])
    if said != " Paris.":
        raise ValueError(f"the converted model completes 'The capital of France is' with {said!r}, not ' Paris.'")

    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    source_path.write_text(json.dumps(source))


def randomise(model: PreTrainedModel) -> None:
    """Draws every parameter so that none can be left out unnoticed: norms are not 1, biases are not 0."""
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2.0, generator=generator)
        elif name.endswith("bias") or "embed_tokens" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            fan_in = parameter.shape[1]
            parameter.normal_(0.0, 1.5 / fan_in**0.5, generator=generator)


def spell_the_old_way(config_path: Path) -> None:
    """Rewrites config.json as transformers 4 wrote it: what most checkpoints on the hub look like."""
    config = json.loads(config_path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True))


def write_checkpoints(out_dir: Path) -> None:
    for name, config in CHECKPOINTS.items():
        folder = out_dir / name
        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model)
        model.save_pretrained(folder)
        log(f"{name}: {sum(p.numel() for p in model.parameters())} parameters")
        if name == "llama3":
            sharded = out_dir / "llama3-sharded"
            shutil.rmtree(sharded, ignore_errors=True)
            model.to(torch.bfloat16).save_pretrained(sharded, max_shard_size="100KB")
            spell_the_old_way(sharded / "config.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    smollm2 = commands.add_parser("smollm2")
    smollm2.add_argument("gguf", type=Path)
    smollm2.add_argument("out_dir", type=Path)
    checkpoints = commands.add_parser("checkpoints")
    checkpoints.add_argument("out_dir", type=Path)
    for name in ("greedy", "logits", "logprobs"):
        command = commands.add_parser(name)
        command.add_argument("model_dir", type=Path)
        command.add_argument("requests", type=Path)
        command.add_argument("out", type=Path)
    arguments = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments.command == "smollm2":
        write_smollm2(arguments.gguf, arguments.out_dir)
    elif arguments.command == "checkpoints":
        write_checkpoints(arguments.out_dir)
    else:
        answer(arguments.command, arguments.model_dir, arguments.requests, arguments.out)


if __name__ == "__main__":
    main()
