"""Which instruction sets a test of the native library goes through."""

import pytest

from quire.device import native

ISAS = native.instruction_sets()


def slow(value):
    """A value that only CI tries."""
    return pytest.param(value, marks=pytest.mark.slow)


def daily(values: list) -> list:
    """One for each instruction set: those that the machine would not choose by itself are tried by CI only."""
    return [*map(slow, values[:-1]), *values[-1:]]


each_isa = pytest.mark.parametrize("isa", daily([*ISAS]))
