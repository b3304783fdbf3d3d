"""How much is tried: something of everything daily, all of it by CI (`--hypothesis-profile thorough`, slow tests)."""

import pytest
from hypothesis import settings

from quire.device import native
from tests.thorough import THOROUGH

ISAS = native.instruction_sets()


def examples(count: int) -> settings:
    """So many of Hypothesis's examples in CI, a third of them daily: for tests that compile for each."""
    is_thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=count if is_thorough else count // 3, deadline=None)


def slow(*values):
    """A value, or one for each parameter, that only CI tries."""
    return pytest.param(*values, marks=pytest.mark.slow)


def daily(values: list) -> list:
    """One for each instruction set: those that the machine would not choose by itself are tried by CI only."""
    return [*map(slow, values[:-1]), *values[-1:]]


each_isa = pytest.mark.parametrize("isa", daily([*ISAS]))
