"""The error of a value that a caller gave: its message is for people, its field and code are for programs."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Container
from dataclasses import fields, is_dataclass
from typing import Any, get_args


class FieldError(ValueError):
    """A value that is refused: which field it came in, a code for the kind of mistake, and a message that says both."""

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        """The name of the parameter or knob that has to change; None if it is not a single one."""
        self.code = code
        """The kind of mistake: "invalid_value" or "context_length_exceeded"."""


EQUIVALENTS = {
    "api_key": "set HF_TOKEN for the hub",
    "attn_implementation": "use attention",
    "best_of": "all n sequences are returned: use n",
    "block_size": "use page_size",
    "cache_dir": "set HF_HOME",
    "chunked_prefill_size": "use max_num_batched_tokens",
    "context_length": "use max_model_len",
    "cpu_offload_gb": "weights stay on the devices: use quantize to make them smaller",
    "ctx_size": "use max_model_len",
    "data_parallel_size": "use AsyncLLM with mesh='data=N'",
    "device": "set JAX_PLATFORMS=cpu, cuda or tpu",
    "device_map": "use mesh='model=N' to split the model over N devices",
    "disable_log_stats": "use quiet",
    "disable_radix_cache": "use prefix_cache",
    "do_sample": "use temperature=0 for the most likely token",
    "download_dir": "set HF_HOME",
    "dp_size": "use AsyncLLM with mesh='data=N'",
    "ebnf": "use structured=Structured(grammar=...)",
    "enable_chunked_prefill": "leave it out: long prompts are always computed in parts of max_num_batched_tokens",
    "enable_expert_parallel": "use mesh='model=N,expert=M'",
    "enable_lora": "merge the adapter: quire.weights.from_huggingface with lora_alpha does",
    "enable_prefix_caching": "use prefix_cache",
    "enforce_eager": "leave it out: every step runs in a compiled program",
    "flash_attn": "use attention",
    "gpu_memory_utilization": "use memory_budget",
    "grammar": "use structured=Structured(grammar=...)",
    "guided_choice": "use structured=Structured(choice=...)",
    "guided_grammar": "use structured=Structured(grammar=...)",
    "guided_json": "use structured=Structured(json_schema=...)",
    "guided_regex": "use structured=Structured(regex=...)",
    "hf_token": "set HF_TOKEN",
    "json_schema": "use structured=Structured(json_schema=...)",
    "kv_cache_dtype": "use attention='pallas-int8' for KV in int8",
    "length_penalty": "tokens are sampled: there is no beam search to weigh",
    "load_in_4bit": "use quantize='int4'",
    "load_in_8bit": "use quantize='int8'",
    "logits_processors": "use logit_bias or structured",
    "lora_modules": "merge the adapter: quire.weights.from_huggingface with lora_alpha does",
    "lora_request": "merge the adapter: quire.weights.from_huggingface with lora_alpha does",
    "max_completion_tokens": "use max_tokens",
    "max_concurrent_requests": "use max_num_seqs",
    "max_length": "use max_tokens for new tokens, max_model_len for a sequence",
    "max_new_tokens": "use max_tokens",
    "max_running_requests": "use max_num_seqs",
    "max_seq_len": "use max_model_len",
    "mem_fraction_static": "use memory_budget",
    "n_batch": "use max_num_batched_tokens",
    "n_ctx": "use max_model_len",
    "n_gpu_layers": "leave it out: all layers are on the device",
    "n_parallel": "use max_num_seqs",
    "n_predict": "use max_tokens",
    "num_beams": "tokens are sampled: use n and logprobs",
    "num_gpu_blocks_override": "use num_pages",
    "num_return_sequences": "use n",
    "num_speculative_tokens": "use drafts",
    "parallel": "use max_num_seqs",
    "pipeline_parallel_size": "use mesh='model=N', which splits every layer over N devices",
    "quantization": "use quantize",
    "quantization_config": "use quantize",
    "regex": "use structured=Structured(regex=...)",
    "repeat_penalty": "use repetition_penalty",
    "request_id": "use id",
    "response_format": "use structured=Structured(...)",
    "sampling_params": "use params",
    "speculative_config": "use draft or drafts",
    "speculative_model": "use draft",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "swap_space": "use num_host_pages",
    "temp": "use temperature",
    "tensor_parallel_size": "use mesh='model=N'",
    "torch_dtype": "use dtype",
    "tp": "use mesh='model=N'",
    "tp_size": "use mesh='model=N'",
    "trust_remote_code": "leave it out: no code of a model is run",
    "use_tqdm": "use progress",
}
"""Names that other engines have, and what to use here."""


def refuse_unknown_arguments[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method: an argument that it does not have is a TypeError that names its equivalent."""
    names = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        for name in given:
            if name not in names:
                owner = _owner(name, method)
                hint = f"use {owner}" if owner else _nearest(name, names[1:])
                raise TypeError(f"{method.__qualname__} has no {name}; {hint}")
        return method(*args, **given)

    return inspect.markcoroutinefunction(checked) if inspect.iscoroutinefunction(method) else checked


def refuse_unknown_fields[T](cls: type[T]) -> type[T]:
    """Decorates a dataclass: a field that it does not have is a FieldError that names the nearest one it has."""
    create = cls.__init__

    @functools.wraps(create)
    def checked(self: T, *args: Any, **given: Any) -> None:
        names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
        if args:
            raise TypeError(
                f"{cls.__name__} takes fields by name, such as {cls.__name__}({names[0]}=...); got {args[0]!r}"
            )
        try:
            create(self, *args, **given)
        except TypeError:
            for name in given:
                if name not in names:
                    raise FieldError(f"{cls.__name__} has no {name}; {_nearest(name, names)}", field=name) from None
            raise

    cls.__init__ = checked
    return cls


def equivalent_flag(flag: str, flags: Container[str]) -> str | None:
    """What to use instead of a flag of another engine, as far as it is one of `flags`; None if it is not known."""
    text = EQUIVALENTS.get(flag.removeprefix("--").replace("-", "_"))
    if text is None:
        return None
    named = re.match(r"use (?:AsyncLLM with )?(\w+)(?:='?([^'\s]+)'?)?(.*)", text)
    if named is None:
        return text
    name, value, rest = named.groups()
    own = "--" + name.replace("_", "-")
    return f"use {own}{' ' + value if value else ''}{rest}" if own in flags else None


def _owner(name: str, method: Callable[..., Any]) -> str | None:
    """An argument of a method whose type has a field of this name, as code; None if there is no such argument."""
    for argument in inspect.signature(method).parameters.values():
        for kind in get_args(argument.annotation):
            if is_dataclass(kind) and name in (field.name for field in fields(kind)):
                return f"{argument.name}={getattr(kind, '__name__', '')}({name}=...)"
    return None


def _nearest(name: str, names: list[str]) -> str:
    if name in EQUIVALENTS:
        return EQUIVALENTS[name]
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
