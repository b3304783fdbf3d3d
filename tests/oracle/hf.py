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
    hf.py embed MODEL_DIR REQUESTS.json OUT.json        [{"tokens": [ids], "pooling": "last" or "mean"}]
                                                     -> [{"embedding": [hidden size]}], of length 1

MODEL_DIR may be a folder of such folders: then each request says which, {"model": name, ...}.

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
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
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


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}


def rope(theta: float, kind: str = "default", **scaling) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **scaling}


# With heads of 16 and theta 5e5 the wavelengths are 6, 32, 167, 862, ... tokens: around 64 original positions
# they reach all three branches of llama3 scaling (kept below 16, blended up to 64, divided above).
LLAMA3_ROPE = rope(
    5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

YARN_ROPE = rope(5e5, "yarn", factor=8.0, original_max_position_embeddings=128, attention_factor=1.2)
LONGROPE = rope(
    1e4,
    "longrope",
    short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    long_factor=[2.0, 3.0, 4.0, 6.0, 9.0, 12.0],
    partial_rotary_factor=0.75,
    original_max_position_embeddings=512,
)
NO_TIE = {key: value for key, value in TINY.items() if key != "tie_word_embeddings"}
GEMMA3 = NO_TIE | {"sliding_window": 24, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "head_dim": 32}
GEMMA4 = NO_TIE | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24, "hidden_size_per_layer_input": 0}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
WINDOWS_OF_TWO = ["sliding_attention", "sliding_attention", "full_attention"]
GPT_OSS = TINY | {"head_dim": 24, "sliding_window": 24, "num_local_experts": 6, "num_experts_per_tok": 3}
GPT_OSS_ROPE = rope(15e4, "yarn", factor=8.0, original_max_position_embeddings=128, truncate=False)
GEMMA3_ROPE = {"full_attention": rope(1e6, "linear", factor=8.0), "sliding_attention": rope(1e4)}

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
    # Every other layer sees all, and its rotation alone is scaled.
    "gemma3": Gemma3TextConfig(**GEMMA3, tie_word_embeddings=True, rope_parameters=GEMMA3_ROPE),
    "gemma3-untied": Gemma3TextConfig(
        **GEMMA3 | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 24},
        tie_word_embeddings=False,
        final_logit_softcapping=20.0,
    ),
    "gemma2": Gemma2Config(
        **NO_TIE | {"num_attention_heads": 8, "num_key_value_heads": 1},
        sliding_window=24,
        head_dim=24,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=8.0,
        final_logit_softcapping=10.0,
        tie_word_embeddings=True,
        rope_parameters=rope(1e4),
    ),
    # The layers that see all have heads of another size; in the second checkpoint also one projection for K and V.
    "gemma4": Gemma4TextConfig(**GEMMA4, tie_word_embeddings=True),
    "gemma4-shared": Gemma4TextConfig(
        **GEMMA4 | {"num_attention_heads": 6, "num_key_value_heads": 2},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=10.0,
        tie_word_embeddings=False,
    ),
    "gpt_oss": GptOssConfig(**GPT_OSS, rope_parameters=GPT_OSS_ROPE),
    "gpt_oss-untruncated": GptOssConfig(
        **GPT_OSS | {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters=GPT_OSS_ROPE | {"truncate": True},
    ),
    "granite": GraniteConfig(
        **TINY | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
        attention_multiplier=0.15,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        rope_parameters=rope(1e4),
    ),
    "granite-tied": GraniteConfig(
        **TINY | {"tie_word_embeddings": True}, attention_multiplier=0.25, rope_parameters=rope(1e6)
    ),
    "ministral": MinistralConfig(
        **TINY | {"num_key_value_heads": 4},
        head_dim=32,
        sliding_window=24,
        layer_types=WINDOWS_OF_TWO,
        rope_parameters=rope(1e6),
    ),
    "olmo2": Olmo2Config(**TINY, rope_parameters=rope(5e5)),
    "olmo2-mha": Olmo2Config(
        **TINY | {"num_key_value_heads": 4, "tie_word_embeddings": True}, rope_parameters=rope(1e4)
    ),
    "olmo3": Olmo3Config(
        **TINY | {"num_attention_heads": 8, "num_key_value_heads": 1},
        sliding_window=24,
        layer_types=WINDOWS_OF_TWO,
        rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": rope(5e5)},
    ),
    "phi3": Phi3Config(
        **TINY | {"tie_word_embeddings": True}, pad_token_id=0, sliding_window=48, rope_parameters=rope(1e4)
    ),
    # Of heads of 16 dimensions 12 turn. Longer contexts than 512 would have other factors.
    "phi3-longrope": Phi3Config(
        **TINY | {"num_key_value_heads": 4},
        pad_token_id=0,
        original_max_position_embeddings=512,
        rope_parameters=LONGROPE,
    ),
    "smollm3": SmolLM3Config(
        **TINY | {"num_hidden_layers": 5, "tie_word_embeddings": True, "pad_token_id": 0}, rope_parameters=rope(2e6)
    ),
    "smollm3-window": SmolLM3Config(
        **TINY | {"num_attention_heads": 6, "hidden_size": 96, "pad_token_id": 0},
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=24,
        rope_parameters=rope(1e4),
    ),
    "qwen3": Qwen3Config(**TINY | {"num_attention_heads": 6}, head_dim=32, rope_parameters=rope(1e6)),
    # Layer 1 has a plain feed-forward.
    "qwen3_moe": Qwen3MoeConfig(
        **TINY,
        **EXPERTS,
        head_dim=16,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        rope_parameters=rope(1e6),
    ),
    # Every second layer has experts, whose weights are left as they are.
    "qwen3_moe-step": Qwen3MoeConfig(
        **TINY | {"num_hidden_layers": 4, "tie_word_embeddings": True},
        **EXPERTS,
        head_dim=32,
        moe_intermediate_size=40,
        decoder_sparse_step=2,
        rope_parameters=rope(1e4),
    ),
    "olmoe": OlmoeConfig(**TINY | {"num_attention_heads": 8}, **EXPERTS, rope_parameters=rope(1e4)),
    "olmoe-normalized": OlmoeConfig(
        **TINY | {"num_key_value_heads": 1}, **EXPERTS, norm_topk_prob=True, rope_parameters=rope(1e4)
    ),
    "mixtral": MixtralConfig(
        **TINY, num_local_experts=5, num_experts_per_tok=2, sliding_window=24, rope_parameters=rope(1e6)
    ),
}


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def load(model_dir: Path) -> PreTrainedModel:
    # Eager attention masks with the plain rule `position - window < key <= position`, one softmax in float32.
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.float().eval()  # what was quantised is expanded to bfloat16, whatever is asked for


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


def embed(model: PreTrainedModel, tokens: list[int], pooling: str) -> dict:
    hidden = model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    return {"embedding": torch.nn.functional.normalize(pooled, dim=0).tolist()}


RUN = {"greedy": greedy, "logits": logits, "logprobs": logprobs, "embed": embed}


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
    global folder, model
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    folder, model = model_dir, load(model_dir) if (model_dir / "config.json").exists() else None


def answer_one(command: str, request: dict):
    of_request = load(folder / request.pop("model")) if model is None else model
    return RUN[command](of_request, **request)


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
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=generator)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 2.0, generator=generator)
        elif name.endswith("bias") or "embed_tokens" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            is_transposed = name.endswith(("experts.gate_up_proj", "experts.down_proj")) and "gpt_oss" in str(
                type(model)
            )
            fan_in = parameter.shape[-2 if is_transposed else -1]
            parameter.normal_(0.0, 1.5 / fan_in**0.5, generator=generator)


def quantise_experts(folder: Path) -> None:
    """Puts experts in MXFP4, of random bits, into the place of a checkpoint's own; transformers expands them itself."""
    generator, tensors = torch.Generator().manual_seed(SEED), load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inner, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (folder / "config.json").write_text(json.dumps(config))


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
        if name == "gpt_oss":
            model.save_pretrained(out_dir / "gpt_oss-mxfp4")
            quantise_experts(out_dir / "gpt_oss-mxfp4")
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
    for name in RUN:
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
