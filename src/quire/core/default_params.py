"""How a model is sampled from where a request does not say: what its authors wrote in generation_config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.core.sampling_params import SamplingParams
from quire.field_error import FieldError

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_params(generation_config: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
    """The sampling parameters of a model, and a note on each field that makes no sense and is left out.

    `do_sample=false` means temperature 0. Fields of other names are not ours to follow.
    """
    given = {name: generation_config[name] for name in FIELDS if generation_config.get(name) is not None}
    params, notes = SamplingParams(), []
    for name, value in given.items():
        try:
            params = dataclasses.replace(params, **{name: value})
        except FieldError as error:
            notes.append(f"left out of the model's sampling: {str(error)[:200]}")
    do_sample = generation_config.get("do_sample")
    if do_sample is False:
        params = dataclasses.replace(params, temperature=0.0)
    elif do_sample not in (None, True):
        notes.append(f"left out of the model's sampling: do_sample={str(do_sample)[:200]!r} must be true or false")
    return params, notes


def describe(params: SamplingParams) -> str:
    """The fields that differ from no sampling at all, for people: `temperature 0.6, top_k 20`; empty if none does."""
    plain = SamplingParams()
    values = {name: getattr(params, name) for name in FIELDS}
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if value != getattr(plain, name))
