"""How much is tried: something of everything daily, all of it by CI (`--hypothesis-profile thorough`, slow tests)."""

import pytest
from hypothesis import settings

from quire.device import native
from tests.thorough import THOROUGH

ISAS = native.instruction_sets()
FLOAT_ISAS = tuple(isa for isa in ISAS if isa != "avx512_vnni")
"""Those that differ in what they do with floats: VNNI adds products of int8."""


def examples(count: int, daily: int | None = None) -> settings:
    """So many of Hypothesis's examples in CI, by default a third of them daily: for tests that compile for each."""
    is_thorough = settings.get_current_profile_name() == THOROUGH
    few = count // 3 if daily is None else daily
    return settings(max_examples=count if is_thorough else few, deadline=None)


def slow(*values):
    """A value, or one for each parameter, that only CI tries."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values):
    """A value, or one for each parameter, of a combination that is tried at night: CI tries its like."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.nightly])


def daily(values: list) -> list:
    """One for each instruction set: of those that the machine would not choose by itself CI tries the best one, and
    the others are tried at night."""
    return [*map(nightly, values[:-2]), *map(slow, values[-2:-1]), *values[-1:]]


each_isa = pytest.mark.parametrize("isa", daily([*ISAS]))
each_float_isa = pytest.mark.parametrize("isa", daily([*FLOAT_ISAS]))
