"""A number or switch that is declared in `SamplingParams` is there for every client, and in the three files that are
written by hand: device/inputs.py, quire.proto and docs/sampling.md. (That the sampler heeds it: tests/device.)
"""

import argparse
import math
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from quire.cli import build_parser, sampling_params
from quire.core.sampling_params import DECLARED, DRAWS, PENALTIES, Declared, Range, SamplingParams
from quire.device.inputs import SCORE_FIELDS, default_samples
from quire.engine.packer import NEUTRAL
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.openai import schema
from quire.server.openai.parse import _sampling

DOC = (Path(__file__).resolve().parents[1] / "docs/sampling.md").read_text()
NUMBERS = [declared for declared in DECLARED.values() if declared.limits]
ON_WIRE = [declared for declared in DECLARED.values() if declared.on_wire]
PROTO = {float: {"double"}, int: {"uint32", "int64"}, bool: {"bool"}}


def by_name(declared: Declared) -> str:
    return declared.name


def other(declared: Declared) -> float:
    """A value that a request over HTTP may have, and that is not the default."""
    if declared.wire is None:
        return not declared.default
    return declared.kind(declared.wire.high) if declared.wire.high != declared.default else 0.5


@pytest.mark.parametrize("declared", NUMBERS, ids=by_name)
def test_the_ends_of_a_range_are_allowed_and_what_is_beyond_is_refused(declared):
    low, high, above = declared.limits
    step = 1 if declared.kind is int else 1e-3
    first = step if above else low
    for value in (first, high):
        assert (
            getattr(SamplingParams(**{"prompt_logprobs": True, declared.name: declared.kind(value)}), declared.name)
            == value
        )
    for value in (low if above else low - step, math.nextafter(high, math.inf) if declared.kind is float else high + 1):
        with pytest.raises(ValueError, match=f"{declared.name}={value!r} must be"):
            SamplingParams(**{declared.name: value})


@pytest.mark.parametrize("declared", ON_WIRE, ids=by_name)
def test_a_request_sets_it_and_one_that_does_not_gets_the_default(declared):
    value, defaults = other(declared), SamplingParams(**{declared.name: other(declared)})
    read = {"model": "m", "prompt": "a", declared.wire_name: value}
    body = msgspec.convert(read, schema.CompletionRequest)
    assert _sampling(body, SamplingParams()) == defaults
    silent = msgspec.convert({"model": "m", "prompt": "a", declared.wire_name: None}, schema.CompletionRequest)
    assert _sampling(silent, defaults) == defaults
    assert _sampling(silent, SamplingParams()) == SamplingParams()


def test_a_request_may_set_what_has_a_default_back():
    defaults = SamplingParams(top_k=40, top_p=0.5, stop=["a"], temperature=0.5, ignore_eos=True, repetition_penalty=2)
    reset = {"top_k": 0, "top_p": 1, "stop": [], "temperature": 1, "ignore_eos": False, "repetition_penalty": 1}
    body = msgspec.convert({"model": "m", "prompt": "a", **reset}, schema.CompletionRequest)
    assert _sampling(body, defaults) == SamplingParams()


@pytest.mark.parametrize(
    ("wire", "means"),
    [({"top_k": -1}, {"top_k": 0}), ({"top_p": 0}, {"top_p": 1e-6}), ({"seed": -1}, {"seed": (1 << 64) - 1})],
    ids=str,
)
def test_some_values_have_a_meaning_of_their_own_in_a_request(wire, means):
    body = msgspec.convert({"model": "m", "prompt": "a", **wire}, schema.CompletionRequest)
    assert _sampling(body, SamplingParams()) == SamplingParams(**means)


@pytest.mark.parametrize("declared", DECLARED.values(), ids=by_name)
def test_the_proto_has_it(declared):
    field = pb.GenerateRequest.DESCRIPTOR.fields_by_name.get(declared.wire_name)
    assert field is not None, f"quire.proto: GenerateRequest needs `optional ... {declared.wire_name} = NUMBER;`"
    kinds = {getattr(field, f"TYPE_{kind.upper()}") for kind in PROTO[declared.kind]}
    assert field.type in kinds, f"quire.proto: {declared.wire_name} must be one of {PROTO[declared.kind]}"
    assert field.has_presence, f"quire.proto: {declared.wire_name} must be optional, so that 0 is not the default"


@pytest.mark.parametrize("name", [*DRAWS, *PENALTIES])
def test_the_device_has_a_column_for_it_whose_default_changes_nothing(name):
    column = getattr(default_samples(3, 64), f"{name}_S", None)
    assert column is not None, f"device/inputs.py: SampleInputs and default_samples need {name}_S"
    assert name not in DRAWS or f"{name}_S" in SCORE_FIELDS, "a token is scored under what it is drawn from"
    assert column.dtype == NEUTRAL[name].dtype
    assert column.tolist() == [NEUTRAL[name]] * 3
    assert name == "temperature" or NEUTRAL[name] == DECLARED[name].default


def shown(limits: Range | None) -> str:
    """A range as the documentation writes it: `0 to 10,000`, `above 0 to 1`, `0 to 2^64 - 1`."""
    if limits is None:
        return ""
    ends = [f"{end:,}".removesuffix(".0") for end in (limits.low, limits.high)]
    for i, end in enumerate((limits.low, limits.high)):
        bits = int(abs(end)).bit_length()
        if bits > 20:
            power = f"2^{bits - 1}" if int(abs(end)).bit_count() == 1 else f"2^{bits} - 1"
            ends[i] = f"-{power}" if end < 0 else power
    return f"{'above ' if limits.above else ''}{' to '.join(ends)}"


def doc_line(declared: Declared) -> str:
    wire = [] if declared.wire_name == declared.name else [f"`{declared.wire_name}`"]
    wire += [shown(declared.wire)] if declared.wire != declared.limits else []
    cells = f"`{declared.name}={declared.default}`", declared.text, shown(declared.limits), ", ".join(wire)
    return " ".join(f"| {cell}".rstrip() for cell in cells) + " |"


@pytest.mark.parametrize("declared", DECLARED.values(), ids=by_name)
def test_the_documentation_says_what_is_declared(declared):
    assert doc_line(declared) in DOC.splitlines(), f"docs/sampling.md needs this line:\n{doc_line(declared)}"


def test_the_documentation_has_every_field_that_is_written_out():
    for field in fields(SamplingParams):
        assert f"| `{field.name}=" in DOC


def parse(command: str, *flags: str) -> argparse.Namespace:
    return build_parser().parse_args([command, "MODEL", *flags])


@pytest.mark.parametrize("declared", [one for one in NUMBERS if one.flag], ids=by_name)
def test_a_flag_sets_it(declared):
    flag, value = "--" + declared.name.replace("_", "-"), other(declared)
    for command in ("generate", "chat"):
        args = parse(command, flag, str(value))
        assert getattr(sampling_params(args, SamplingParams()), declared.name) == value


def test_what_no_flag_says_is_the_models_default_else_the_commands():
    plain, model = SamplingParams(), SamplingParams(temperature=0.6, top_k=20, stop=["a"])
    assert sampling_params(parse("generate"), plain) == replace(plain, temperature=0, max_tokens=64)
    assert sampling_params(parse("chat"), plain) == replace(plain, temperature=0.7)
    assert sampling_params(parse("generate"), model) == replace(model, max_tokens=64)
    flags = ("--temperature", "0", "--top-k", "0", "--stop", "b")
    assert sampling_params(parse("chat", *flags), model) == SamplingParams(temperature=0, stop=["b"])
