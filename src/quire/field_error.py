"""The error of a value that a caller gave: its message is for people, its field and code are for programs."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Container
from dataclasses import fields
from typing import Any


class FieldError(ValueError):
    """A value that is refused: which field it came in, a code for the kind of mistake, and a message that says both."""

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        """The name of the parameter or knob that has to change; None if it is not a single one."""
        self.code = code
        """The kind of mistake: "invalid_value" or "context_length_exceeded"."""


EQUIVALENTS = {
    "best_of": "all n sequences are returned: use n",
    "block_size": "use page_size",
    "data_parallel_size": "use AsyncLLM with mesh='data=N'",
    "disable_log_stats": "use quiet",
    "do_sample": "use temperature=0 for the most likely token",
    "download_dir": "set HF_HOME",
    "enable_prefix_caching": "use prefix_cache",
    "gpu_memory_utilization": "use memory_budget",
    "guided_choice": "use structured=Structured(choice=...)",
    "guided_grammar": "use structured=Structured(grammar=...)",
    "guided_json": "use structured=Structured(json_schema=...)",
    "guided_regex": "use structured=Structured(regex=...)",
    "load_in_4bit": "use quantize='int4'",
    "load_in_8bit": "use quantize='int8'",
    "max_length": "use max_tokens for new tokens, max_model_len for a sequence",
    "max_new_tokens": "use max_tokens",
    "max_seq_len": "use max_model_len",
    "n_ctx": "use max_model_len",
    "num_beams": "tokens are sampled: use n and logprobs",
    "num_return_sequences": "use n",
    "quantization": "use quantize",
    "response_format": "use structured=Structured(...)",
    "sampling_params": "use params",
    "speculative_model": "use draft",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "swap_space": "use num_host_pages",
    "tensor_parallel_size": "use mesh='model=N'",
    "torch_dtype": "use dtype",
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
                raise TypeError(f"{method.__qualname__} has no {name}; {_nearest(name, names[1:])}")
        return method(*args, **given)

    return inspect.markcoroutinefunction(checked) if inspect.iscoroutinefunction(method) else checked


def refuse_unknown_fields[T](cls: type[T]) -> type[T]:
    """Decorates a dataclass: a field that it does not have is a FieldError that names the nearest one it has."""
    create = cls.__init__

    @functools.wraps(create)
    def checked(self: T, *args: Any, **given: Any) -> None:
        try:
            create(self, *args, **given)
        except TypeError:
            names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
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


def _nearest(name: str, names: list[str]) -> str:
    if name in EQUIVALENTS:
        return EQUIVALENTS[name]
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
