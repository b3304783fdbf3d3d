"""Mistakes that people make: the message says what is wrong and what to do instead."""

import asyncio
import errno
import importlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from quire import (
    LLM,
    AsyncLLM,
    AttentionConfig,
    EngineConfig,
    Request,
    Rollouts,
    SamplingParams,
    Structured,
    cli,
    train,
    weights,
)
from quire.cli import main
from tests.fake_llm import LONG_S, fake_llm
from tests.server.tiny_folder import write_tiny_folder
from tests.tiny import tiny_config, tiny_tensors

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


class State(dict):
    """As flax.nnx.State: a mapping of variables."""

    def to_pure_dict(self):
        return dict(self)


class PydanticLike:
    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def llm():
    with fake_llm() as made:
        yield made


CALLS = {
    "from_params of a state": (
        lambda llm: LLM.from_params(tiny_config(), State(embed=1)),
        "a state of Flax: begin with params.to_pure_dict",
    ),
    "from_params of nothing": (lambda llm: LLM.from_params(tiny_config(), {}), "it is empty: give a dict as in docs/"),
    "from_params with a file for a tokenizer": (
        lambda llm: LLM.from_params(tiny_config(), {"embed": 1}, "tokenizer.json"),
        "tokenizer='tokenizer.json' must be a quire Tokenizer: make one",
    ),
    "chat of one message": (
        lambda llm: llm.chat({"role": "user", "content": "a"}),
        "messages is one message: give messages",
    ),
    "generate of messages": (lambda llm: llm.generate([{"role": "user"}], progress=False), "messages are for LLM.chat"),
    "no model": (lambda llm: LLM(None), "MODEL None must be a folder, a GGUF file or a name on the hub"),
    "an empty model": (lambda llm: LLM(""), "MODEL '' must be a folder, a GGUF file or a name on the hub"),
    "a model that is a config": (lambda llm: LLM({}), "MODEL {} must be a folder, a GGUF file or a name on the hub"),
    "sampling_params": (lambda llm: llm.generate("a", sampling_params=SamplingParams()), "use params"),
    "use_tqdm": (lambda llm: llm.generate("a", use_tqdm=False), "use progress"),
    "cachesalt": (lambda llm: llm.generate("a", cachesalt="b"), "did you mean cache_salt?"),
    "sampling_params of stream": (lambda llm: llm.stream("a", sampling_params=1), "LLM.stream has no sampling_params"),
    "sampling_params of score": (lambda llm: llm.score([1, 2], sampling_params=1), "LLM.score has no sampling_params"),
    "sampling_params of AsyncLLM": (
        lambda llm: AsyncLLM.generate(None, "a", sampling_params=1),  # pyright: ignore
        "AsyncLLM.generate has no sampling_params; use params",
    ),
    "sampling_params of Rollouts": (
        lambda llm: Rollouts.submit(None, "a", sampling_params=1),  # pyright: ignore
        "Rollouts.submit has no sampling_params; use params",
    ),
    "sampling_params of chat": (lambda llm: llm.chat([{}], sampling_params=1), "LLM.chat has no sampling_params"),
    **{
        f"engine {name}": (lambda llm, name=name: LLM("nowhere", **{name: 2}), f"EngineConfig has no {name}; {hint}")
        for name, hint in {
            "tensor_parallel_size": "use mesh='model=N'",
            "gpu_memory_utilization": "use memory_budget",
            "enable_prefix_caching": "use prefix_cache",
            "block_size": "use page_size",
            "quantization": "use quantize",
            "trust_remote_code": "leave it out",
            "torch_dtype": "use dtype",
            "n_ctx": "use max_model_len",
            "swap_space": "use num_host_pages",
            "load_in_8bit": "use quantize='int8'",
        }.items()
    },
    **{
        f"sampling {name}": (
            lambda llm, name=name: SamplingParams(**{name: 2}),
            f"SamplingParams has no {name}; {hint}",
        )
        for name, hint in {
            "guided_json": "use structured=Structured(json_schema=...)",
            "guided_regex": "use structured=Structured(regex=...)",
            "max_new_tokens": "use max_tokens",
            "do_sample": "use temperature=0",
            "best_of": "all n sequences are returned",
            "num_beams": "tokens are sampled",
            "response_format": "use structured=Structured(...)",
            "stop_words": "use stop",
        }.items()
    },
}


TOKENS = np.array([[1, 2, 3, 4]])
TREE = {"embed": 1, "layers": []}


def _async(ask):
    """Run `ask` on an AsyncLLM over the fake engine."""

    async def run():
        async with AsyncLLM.from_factory(fake_llm) as llm:
            return await ask(llm)

    return asyncio.run(asyncio.wait_for(run(), LONG_S))


def _start(open_llm):
    return asyncio.run(asyncio.wait_for(AsyncLLM.from_factory(open_llm).start(), LONG_S))


CALLS |= {
    f"{kind.__name__} {name}={value!r}": (lambda llm, kind=kind, name=name, value=value: kind(**{name: value}), says)
    for kind, name, value, says in [
        (EngineConfig, "max_num_seqs", "8", "max_num_seqs='8' must be a whole number from 1 to"),
        (EngineConfig, "max_num_seqs", True, "max_num_seqs=True must be a whole number"),
        (EngineConfig, "memory_budget", 0.9, "must be bytes such as 4294967296, a size such as 4GiB"),
        (EngineConfig, "memory_budget", "4 gigs", "memory_budget='4 gigs' must be bytes such as"),
        (EngineConfig, "memory_budget", "150%", "memory_budget='150%' must be above 0% and at most 100%"),
        (EngineConfig, "mesh", 4, "mesh=4 must say how many devices an axis has, such as 'model=4'"),
        (EngineConfig, "mesh", "tp=4", "has an axis 'tp'; there are 'model'"),
        (EngineConfig, "dtype", "half", "must be one of bfloat16, float32"),
        (EngineConfig, "quantize", "awq", "quantize='awq' must be one of int8, int4"),
        (EngineConfig, "quantize", ["int8"], "must be one of int8, int4"),
        (EngineConfig, "prefix_cache", 1, "prefix_cache=1 must be True or False"),
        (EngineConfig, "record", "", "record='' must be the path of a new file"),
        (EngineConfig, "compile_cache", True, "compile_cache=True must be a path"),
        (EngineConfig, "group_key_file", 5, "group_key_file=5 must be a path"),
        (EngineConfig, "num_processes", 2, "several processes need an address to meet at"),
        (EngineConfig, "drafts", 2, "must be a whole number from 4 to 1,024, or 0 for never"),
        (SamplingParams, "temperature", "0.7", "temperature='0.7' must be a number from 0 to 10000"),
        (SamplingParams, "temperature", math.nan, "temperature=nan must be a number from 0"),
        (SamplingParams, "temperature", np.array([0.5, 1.0]), "temperature=array([0.5, 1. ]) must be a number"),
        (SamplingParams, "top_k", np.array([1, 2]), "top_k=array([1, 2]) must be a whole number"),
        (SamplingParams, "top_p", 0, "top_p=0 must be a number above 0 to 1"),
        (SamplingParams, "top_k", -1, "top_k=-1 must be a whole number from 0"),
        (SamplingParams, "n", 0, "n=0 must be a whole number from 1 to 1,024"),
        (SamplingParams, "stop", None, "must be a string or a list of strings"),
        (SamplingParams, "stop", ["a"] * 100, "stop has 100 entries, at most 64"),
        (SamplingParams, "stop", [5], "put strings or lists of token ids there (ids: stop_token_ids)"),
        (SamplingParams, "stop", [""], "an empty entry, which would end every sequence"),
        (SamplingParams, "stop_token_ids", {1}, "stop_token_ids={1} must be a list of token ids"),
        (SamplingParams, "logit_bias", {"5": 1}, "a token id of logit_bias='5' must be a whole number"),
        (SamplingParams, "logit_bias", [1], "logit_bias=[1] must map token ids to numbers"),
        (SamplingParams, "logprobs", True, "logprobs=True must be a whole number"),
        (SamplingParams, "prompt_logprobs", 5, "prompt_logprobs=5 must be True or False"),
        (SamplingParams, "structured", {"type": "object"}, "must be Structured(...)"),
        (SamplingParams, "pooling", "cls", "pooling='cls' must be 'last' or 'mean'"),
        (SamplingParams, "min_tokens", -1, "min_tokens=-1 must be a whole number from 0"),
        (SamplingParams, "max_completion_tokens", 5, "use max_tokens"),
        (SamplingParams, "length_penalty", 1, "there is no beam search"),
        (SamplingParams, "n_predict", 5, "use max_tokens"),
        (SamplingParams, "repeat_penalty", 1.1, "use repetition_penalty"),
        (SamplingParams, "regex", "a", "use structured=Structured(regex=...)"),
        (SamplingParams, "json_schema", {}, "use structured=Structured(json_schema=...)"),
        (SamplingParams, "ebnf", "a", "use structured=Structured(grammar=...)"),
        (SamplingParams, "logits_processors", [], "use logit_bias or structured"),
        (Structured, "json_schema", 5, "structured.json_schema must be an object, or one as JSON text, got int"),
        (Structured, "json_schema", "{", "structured.json_schema is not JSON"),
        (Structured, "choice", "a", "structured.choice must be a list of at least one string"),
        (Structured, "choice", [1], "structured.choice[0] must be a string, got int"),
        (Structured, "regex", 5, "structured.regex must be a string, got int"),
        (Structured, "json_object", "yes", "structured.json_object='yes' must be True or False"),
        (Structured, "compact", True, "must have exactly one of json_schema, json_object, regex, choice, grammar"),
        (Structured, "schema", {}, "did you mean json_schema?"),
    ]
}
CALLS |= {
    f"request {name}={value!r}": (
        lambda llm, name=name, value=value: Request(
            **{"id": "a", "prompt_token_ids": (1,), "params": SamplingParams()} | {name: value}
        ),
        says,
    )
    for name, value, says in [
        ("id", 5, "id=5 must be a string"),
        ("prompt_token_ids", "text", "prompt_token_ids='text' must be a tuple of token ids; encode text first"),
        ("prompt_token_ids", 5, "prompt_token_ids=5 must be a tuple of token ids"),
        ("priority", "high", "priority='high' must be a whole number"),
        ("cache_salt", 5, "cache_salt=5 must be a string"),
        ("request_id", "a", "Request has no request_id; use id"),
    ]
}
CALLS |= {
    f"engine name {name}": (lambda llm, name=name: LLM("nowhere", **{name: 1}), f"EngineConfig has no {name}; {hint}")
    for name, hint in {
        "tp_size": "use mesh='model=N'",
        "dp_size": "use AsyncLLM with mesh='data=N'",
        "context_length": "use max_model_len",
        "mem_fraction_static": "use memory_budget",
        "max_running_requests": "use max_num_seqs",
        "chunked_prefill_size": "use max_num_batched_tokens",
        "num_gpu_blocks_override": "use num_pages",
        "num_speculative_tokens": "use drafts",
        "device_map": "use mesh='model=N'",
        "enforce_eager": "leave it out",
        "n_gpu_layers": "leave it out",
        "hf_token": "set HF_TOKEN",
        "cache_dir": "set HF_HOME",
        "attn_implementation": "use attention",
    }.items()
}
CALLS |= {
    "params by position": (lambda llm: SamplingParams(0.5), "SamplingParams takes fields by name, such as"),
    "a form by position": (lambda llm: Structured({}), "Structured takes fields by name"),
    "min above max": (lambda llm: SamplingParams(min_tokens=5, max_tokens=2), "lower the first or raise the second"),
    "a path of a template": (lambda llm: LLM("x", chat_template=5), "chat_template=5 must be the path of a file"),
    "a template that is text": (lambda llm: LLM("x", chat_template="{{ a }}"), "{{ a }} cannot be read"),
    "a revision": (lambda llm: LLM("a/b", revision=5), "revision=5 must be a commit (40 hex digits), a branch or"),
    "a URL": (lambda llm: LLM("https://huggingface.co/a/b"), "a name on the hub (org/name"),
    "a GGUF file that is not there": (lambda llm: LLM("a.gguf"), "MODEL 'a.gguf' does not exist; give a folder"),
    "a mesh of devices": (lambda llm: LLM("x", mesh=[1]), "mesh=[1] must say how many devices"),
    "a mesh of several engines": (lambda llm: LLM("x", mesh="data=2"), "AsyncLLM and `quire serve` take it"),
    "no config": (lambda llm: LLM.from_params(None, {}), "model_config is of type NoneType: give a ModelConfig"),
    "config and params swapped": (lambda llm: LLM.from_params({}, tiny_config()), "model_config is of type dict"),
    "params that are a path": (lambda llm: LLM.from_params(tiny_config(), "a"), "params is of type str: give a dict"),
    "params below a name": (lambda llm: LLM.from_params(tiny_config(), {"params": {}}), "it has 'params'"),
    "an engine that is a path": (lambda llm: LLM.from_engine("model"), "engine='model' must be an Engine"),
    "no engine": (lambda llm: LLM.from_engine(None), "engine=None must be an Engine; LLM(model) opens a model"),
    "eos_ids": (lambda llm: tiny_config(eos_ids=5), "eos_ids=5 must be a tuple of token ids"),
    "rotary": (
        lambda llm: AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rotary=5),
        "rotary=5 must be a RotaryConfig",
    ),
    "temperature of generate": (
        lambda llm: llm.generate("a", temperature=0),
        "use params=SamplingParams(temperature=...)",
    ),
    "n of submit": (lambda llm: Rollouts.submit(None, "a", n=2), "use params=SamplingParams(n=...)"),
    "lora_request": (lambda llm: llm.generate("a", lora_request=1), "merge the adapter"),
    "an argument of embed": (lambda llm: llm.embed("a", foo=1), "LLM.embed has no foo; there are prompts, pooling"),
    "a number for prompts": (lambda llm: llm.generate(5), "prompts=5 must be text, a list of token ids"),
    "bytes for prompts": (lambda llm: llm.generate(b"a"), "must be text, a list of token ids, or a list of either"),
    "an empty prompt": (lambda llm: llm.generate(""), "prompts[0]: the prompt is empty; give at least one token"),
    "a token beyond the vocabulary": (lambda llm: llm.generate([99]), "prompt token 99 is no token id (0 to 10)"),
    "two params for one prompt": (lambda llm: llm.generate("a", [SamplingParams()] * 2), "give one, or one for each"),
    "params that are a dict": (lambda llm: llm.generate("a", {"n": 1}), "must be SamplingParams(...), or a list with"),
    "logprobs beyond the engine's": (
        lambda llm: llm.generate("a", SamplingParams(logprobs=100)),
        "start the engine with max_logprobs=100",
    ),
    "score of a number": (lambda llm: llm.score(5), "token_ids=5 must be a list of token ids"),
    "score from 0": (lambda llm: llm.score([1, 2], start=0), "start=0 must be a whole number from 1"),
    "chat of a number": (lambda llm: llm.chat(5), "messages=5 must be a list of messages"),
    "chat of an iterator": (lambda llm: llm.chat(iter([{}])), "must be a list of messages, or a list of such lists"),
    "chat of text": (lambda llm: llm.chat("hi"), "messages is a string: give messages, such as"),
    "dimensions of embed": (lambda llm: llm.embed("a", dimensions=0), "a whole number from 1 to 8, the model's hidden"),
    "text to decode": (lambda llm: llm.tokenizer.decode("abc"), "token_ids='abc' must be a list of token ids"),
    "a version": (lambda llm: llm.set_weights(1, version=[1]), "version=[1] must be a whole number or a string"),
    "running": (lambda llm: llm.set_weights(1, running="drop"), "running='drop' must be keep, recompute or abort"),
    "a request that is text": (lambda llm: llm.engine.add("hello"), "'hello' must be a Request(id=..."),
    "a factory that is an LLM": (lambda llm: _start(llm), "must be a function that returns an LLM"),
    "a factory that returns nothing": (lambda llm: _start(lambda: None), "must return an LLM, it returned None"),
    "a factory of Rollouts": (lambda llm: Rollouts.from_factory(lambda: 5), "must return an LLM, it returned 5"),
    "no factory": (lambda llm: AsyncLLM.from_factory(), "from_factory needs a function that returns an LLM"),
    "max_waiting": (lambda llm: AsyncLLM("x", max_waiting=0), "max_waiting=0 must be a whole number from 1"),
    "a time that is text": (
        lambda llm: _async(lambda one: one.generate("a", timeout_s="5")),
        "timeout_s='5' must be a number of seconds",
    ),
    "a time that is no number": (
        lambda llm: _async(lambda one: one.generate("a", timeout_s=math.nan)),
        "timeout_s=nan must be a number of seconds",
    ),
    "many prompts at once": (lambda llm: _async(lambda one: one.generate(["a", "b"])), "asyncio.gather several calls"),
    "a call of text": (lambda llm: _async(lambda one: one.call("x")), "'x' must be a function of the engine"),
    "logprobs without a tree": (lambda llm: train.logprobs(None, TOKENS, tiny_config()), "params is of type NoneType"),
    "logprobs in another order": (lambda llm: train.logprobs(TREE, tiny_config(), TOKENS), "give logprobs(params, tok"),
    "logprobs of a list": (lambda llm: train.logprobs(TREE, [[1]], tiny_config()), "tokens is of type list: give an"),
    "logprobs of floats": (lambda llm: train.logprobs(TREE, TOKENS / 1.0, tiny_config()), "tokens is of type float64"),
    "logprobs of names": (lambda llm: train.logprobs({"a.b": 1}, TOKENS, tiny_config()), "weights.from_huggingface"),
    "logprobs in half": (lambda llm: train.logprobs(TREE, TOKENS, tiny_config(), dtype="half"), "dtype='half' must be"),
    "tensors that are a path": (lambda llm: weights.from_huggingface("a", tiny_config()), "tensors is of type str"),
    "tensors without a config": (lambda llm: weights.from_huggingface({}, None), "config is of type NoneType: give a"),
    "tensors of another shape": (
        lambda llm: weights.from_huggingface(
            tiny_tensors(tiny_config()) | {"lm_head.weight": np.zeros((2, 2), np.float32)}, tiny_config()
        ),
        "lm_head.weight is [2, 2], expected [97, 32]",
    ),
    "compare without an LLM": (lambda llm: weights.compare(None, len, TOKENS), "give compare(llm, forward, tokens)"),
}


@pytest.fixture(scope="module")
def rollouts():
    with Rollouts.from_factory(fake_llm) as made:
        yield made


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda made: made.collect(0), "groups=0 must be a whole number from 1"),
        (lambda made: made.collect(1), "submit more, or wait for other threads to do so with timeout_s"),
        (lambda made: made.collect(1, timeout_s="a"), "timeout_s='a' must be a number of seconds"),
        (lambda made: made.collect(1, max_lag=-1), "max_lag=-1 must be a whole number from 0"),
        (lambda made: made.submit([]), "prompts is empty: give a prompt"),
        (lambda made: made.submit("a", group=[1]), "group=[1] is no name: give a number, a string or a tuple"),
        (lambda made: made.abort([1]), "group=[1] is no name: give a number, a string or a tuple"),
        (lambda made: made.call(5), "5 must be a function of the engine"),
        (lambda made: made.session("abc"), "token_ids='abc' must be a list of token ids; encode text"),
    ],
)
def test_a_call_of_rollouts_that_is_wrong_says_what_to_do(rollouts, call, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        call(rollouts)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 5\n"


def _config(**changes):
    def edit(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _shards(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda x: (x / "config.json").unlink(), "is a folder that has no config.json; give the folder of a model"),
        (
            lambda x: (x / "config.json").rename(x / "adapter_config.json"),
            "holds an adapter: merge it into its model, and give that",
        ),
        (
            lambda x: (x / "model.safetensors").rename(x / "pytorch_model.bin"),
            "no .safetensors file in this folder, it has pytorch_model.bin; save the weights as safetensors",
        ),
        (lambda x: (x / "model.safetensors").write_bytes(LFS), "a pointer of Git LFS; fetch the file itself with"),
        (lambda x: (x / "model.safetensors").write_bytes(b""), "is not a safetensors file: it is empty"),
        (_shards, "index.json lists model-00002-of-00002.safetensors, which the folder does not have"),
        (lambda x: (x / "config.json").write_text("<html>"), "config.json is not JSON"),
        (lambda x: (x / "config.json").write_text("[]"), "config.json must hold a JSON object, got list"),
        (_config(model_type="bert"), "architecture 'bert' is not supported; supported are gemma2"),
        (_config(hidden_size="32"), "config.json: hidden_size='32' must be int"),
        (_config(quantization_config={"quant_method": "awq"}), "quantised by 'awq' are not supported; take the"),
    ],
)
def test_a_folder_that_is_wrong_says_what_to_do(edit, says, tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny")
    edit(folder)
    with pytest.raises(ValueError, match=re.escape(says)):
        LLM(folder, quiet=True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.gguf", LFS, "is a pointer of Git LFS"),
        ("a.gguf", b"", "it is empty; fetch it again"),
        ("a.gguf", b"GGUF\x03\0\0\0", "reach past the end of the file"),
        ("a.safetensors", b"GGML", "give its folder, with config.json and .safetensors files"),
        ("a.bin", b"PK\x03\x04" * 9, "give its folder, with config.json and .safetensors files"),
    ],
)
def test_a_file_that_is_wrong_says_what_to_do(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says)):
        LLM(tmp_path / name, quiet=True)


TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n1,5,5\n"
KEY = "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("run m", "invalid choice: 'run' (choose from"),
        ("serve", "the following arguments are required: MODEL"),
        ("serve --model m", "give MODEL without a flag, as the first argument"),
        ("generate m --prompt hi", "give PROMPT without a flag, after MODEL"),
        ("generate m a --temp 0", "use --temperature"),
        ("generate m a --n-gpu-layers 9", "leave it out: all layers are on the device"),
        ("serve m --ctx-size 9", "use --max-model-len"),
        ("serve m --tp 2", "use --mesh model=N"),
        ("serve m --mem-fraction-static 1", "use --memory-budget"),
        ("generate m a --host x", "unrecognized arguments: --host x"),
        ("generate m a --max-tokens ten", "argument --max-tokens: invalid int value: 'ten'"),
        ("generate ./no a --max-tokens -1", "max_tokens=-1 must be a whole number from 0"),
        ("generate ./no a --max-num-seqs 0", "max_num_seqs=0 must be a whole number from 1"),
        ("generate ./no a --page-size 0", "page_size=0 must be a whole number from 1"),
        ("generate ./no a --memory-budget 4gigs", "memory_budget='4gigs' must be bytes such as"),
        ("generate ./no a --dtype fp16", "dtype='fp16' must be one of bfloat16, float32"),
        ("generate ./no a --mesh 2", "mesh='2' must say how many devices an axis has"),
        ("generate ./no a --process-id 1", "process_id=1 must be a whole number from 0 to 0"),
        ("generate ./no a", "MODEL './no' does not exist; give a folder, a GGUF file or a name on the hub"),
        ("serve ./no --port 70000", "port=70000 must be a whole number from 0 to 65,535"),
        ("serve ./no --host http://a", "host='http://a' must be an address or a name, without http://"),
        ("serve ./no --max-priority -1", "max_priority=-1 must be a whole number from 0"),
        ("serve ./no --served-model-name=", "served_model_name='' is empty; give a value, or leave it out"),
        ("serve ./no --batch-folder=", "batch_folder='' is empty; give a value, or leave it out"),
        ("serve ./no --api-key short", "a key must be at least 8 printable ASCII characters"),
        ("serve ./no --api-key-file {words}", "words, line 1: word 2 is not FIELD=VALUE with a known field"),
        ("serve ./no --api-key-file {weight}", "weight, line 1: weight=heavy must be a whole number from 1"),
        ("serve ./no --api-key-file {empty}", "holds no key; write one per line"),
        ("serve ./no --allow-origin a:3000", "must be * or SCHEME://HOST[:PORT] in lower case"),
        ("serve ./no --access-log none", "access_log='none' must be all, errors or off"),
        ("batch ./no {trace}", "the following arguments are required: -o/--output"),
        ("batch ./no ./none -o {out}", "INPUT none is no file"),
        ("batch ./no {twice} -o {out}", "line 2 repeats custom_id 'a' of line 1; give every line its own"),
        ("batch ./no {lines} -o {lines}", "would be written, and is the input: give another name"),
        ("replay ./none", "none cannot be read: No such file"),
        ("replay {trace}", "trace is no recording, or damaged"),
        ("simulate", "simulate needs --trace FILE or --recording FILE, and not both"),
        ("simulate --trace {trace}", "simulate needs --calibration FILE, or --model MODEL and --topology NAME"),
        ("simulate --trace {trace} --calibration {lines}", "'format' is missing"),
        ("simulate {sim} --topology v5e-3", "give one such as v5e:2x2 for 4 chips"),
        ("simulate {sim} --requests -1", "requests=-1 must be a whole number from 1"),
        ("simulate {sim} --requests 0", "requests=0 must be a whole number from 1"),
        ("simulate {sim} --scale nan", "scale=nan must be a number above 0"),
        ("simulate {sim} --target-first-token -1", "target_first_token=-1.0 must be a number above 0"),
        ("simulate {sim} --tenant-weights a=-1", "weights['a']=-1.0 must be a number from 0.001"),
        ("simulate {sim} --tenant-weights a", "'a' must be NAME=NUMBER, such as alice=2,bob=0.5"),
        ("simulate {sim} --rate x", "argument --rate: 'x' must be numbers above 0, such as 0.5,1,2"),
        ("simulate {sim} --replicas 0", "argument --replicas: '0' must be whole numbers above 0, such as 8,32,64"),
        ("simulate {sim} --sweep page_size=a", "values of page_size must be whole numbers"),
        ("simulate {sim} --sweep prefix_cache=yes", "values of prefix_cache must be true or false"),
        ("simulate {sim} --trace {twice}", "'num_prefill_tokens' is missing"),
        ("bench throughput", "throughput needs MODEL"),
        ("bench speed m", "invalid choice: 'speed' (choose from"),
        ("bench throughput m --rows a", "argument --rows: 'a' must be whole numbers above 0"),
        ("bench serve --url localhost:1", "must begin with http:// or https:// and name a server"),
        ("plan {model} --topology foo", "'foo' is none of the chips v5e"),
    ],
)
def test_a_command_that_is_wrong_says_what_to_do(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    line = json.dumps({"custom_id": "a"}) + "\n"
    files = {"trace": TRACE, "lines": line, "twice": 2 * line, "empty": "", "words": f"{KEY} a", "out": ""}
    paths = {"model": tmp_path / "tiny"}
    for name, text in (files | {"weight": f"{KEY} weight=heavy"}).items():
        paths[name] = tmp_path / name
        paths[name].write_text(text)
        paths[name].chmod(0o600)
    if "{sim}" in args or "{model}" in args:
        write_tiny_folder(paths["model"])
    sim = f"--model {paths['model']} --topology v5e:1x1 --num-pages 64 --trace {paths['trace']}"
    try:
        status = main(args.format(sim=sim, **paths).split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_wrong_says_what_to_do(name, llm):
    call, says = CALLS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call(llm)
    assert says in str(caught.value)


def test_a_call_from_another_thread_names_what_threads_may_use(llm):
    raised = []

    def call():
        try:
            llm.generate([[1]], progress=False)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "use quire.AsyncLLM, or quire.Rollouts" in raised[0]


@pytest.mark.parametrize("dtype", [jnp.float32, np.float32, np.dtype("float32"), jnp.dtype("float32"), "float32"])
def test_a_dtype_may_be_jaxs_or_numpys(dtype):
    assert EngineConfig(dtype=dtype).dtype == "float32"
    assert EngineConfig(dtype=jnp.bfloat16).dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype='float16' must be one of bfloat16, float32"):
        EngineConfig(dtype=np.float16)  # pyright: ignore[reportArgumentType]


def test_a_pydantic_model_is_a_json_schema():
    assert Structured(json_schema=PydanticLike) == Structured(json_schema=PydanticLike.model_json_schema())


def test_a_folder_with_gguf_files_is_named_with_the_file_to_give(tmp_path, capsys):
    (tmp_path / "model.Q4_1.gguf").touch()
    assert main(["generate", str(tmp_path), "a"]) == 2
    error = capsys.readouterr().err
    assert "is a folder with GGUF files and no config.json" in error
    assert f"give the file, '{tmp_path}/model.Q4_1.gguf'" in error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset by peer"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.json"), "a.json cannot be used: No such file"),
        (OSError("the group is gone"), "the group is gone"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_of_the_system_is_one_line_which_does_not_blame_the_output(monkeypatch, capsys, error, line):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == f"quire: {line}\n"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--tensor-parallel-size", "use --mesh model=N"),
        ("--data-parallel-size", "use --mesh data=N"),
        ("--gpu-memory-utilization", "use --memory-budget"),
        ("--trust-remote-code", "leave it out: no code of a model is run"),
        ("--load-in-8bit", "use --quantize int8"),
        ("--swap-space", "use --num-host-pages"),
        ("--block-size", "use --page-size"),
        ("--download-dir", "set HF_HOME"),
        ("--page-sise", "did you mean --page-size?"),
    ],
)
def test_a_flag_of_another_engine_names_the_equivalent(flag, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", flag, "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {flag} 2; {says}\n")


def test_a_flag_that_samples_names_the_equivalent(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "model", "a", "--max-new-tokens", "3"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --max-new-tokens 3; use --max-tokens\n")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["serve", "--help-all"], ["--print-completion", "bash"]])
def test_a_full_disk_is_one_line(args, unbuffered):
    command, env = [sys.executable, "-m", "quire", *args], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.stderr == "quire: standard output cannot be used: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_usage(example):
    done = subprocess.run([sys.executable, str(example), "--help"], capture_output=True, text=True, timeout=300)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("a library of this example is not installed")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python examples/{example.name}" in done.stdout


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("quire.integrations.ray", "build_app", "quire.integrations.ray needs Ray: pip install 'quire-llm[ray]'"),
        ("quire.integrations.tunix", "QuireRollout", "quire.integrations.tunix needs Tunix: pip install google-tunix"),
    ],
)
def test_an_integration_without_its_package_names_what_to_install(module, name, says):
    with pytest.raises(ModuleNotFoundError, match=re.escape(says)):
        getattr(importlib.import_module(module), name)
