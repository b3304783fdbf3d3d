"""What a compiled program's text says: every large copy, and every collective.

Instructions inside fusions are not moves of memory and do not count, unless a fusion has nothing else in it. Nor does
what goes to and from a chip's own memory (layouts with `S(1)`), which is how a compiler brings a weight in before it is
needed.
"""

import re
from dataclasses import dataclass, replace
from math import prod

COPIES = {"copy", "transpose", "bitcast-convert"}
NOT_MOVES = {"parameter", "bitcast", "reshape", "tuple", "get-tuple-element"}
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
NUM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([\w-]+)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.-]+)")
_BODY = re.compile(r"body=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERAND = re.compile(r"%([\w.-]+)")
_LAYOUT = r"(\{[^}]*\})?"
FREE = NOT_MOVES | {"constant", "copy-done", "slice-done", "after-all", "partition-id"}
PARTIAL = {"gather", "scatter", "dynamic-slice", "dynamic-update-slice"}
"""They touch a few rows of their largest array, which is as large as a pool or an embedding."""


@dataclass(frozen=True)
class Instruction:
    """One instruction that runs by itself."""

    opcode: str
    arrays: str
    """What it makes: types, shapes and layouts."""
    num_bytes: float
    """Of the largest array that it makes, wherever that is."""
    text: str


def instructions(text: str) -> list[Instruction]:
    """All instructions of a program outside fusions, as `compiled.as_text()` prints them.

    A fusion that only moves an array counts as the copy or transpose that it is.
    """
    lines = text.splitlines()
    fusions = {name for line in lines if " fusion(" in line for name in _CALLED.findall(line)}
    inside: dict[str, set[str]] = {name: set() for name in fusions}
    found, computation = [], ""
    for line in lines:
        if begin := _COMPUTATION.match(line):
            computation = begin[1]
        elif match := _INSTRUCTION.match(line):
            opcode = match[2].removesuffix("-start")
            if computation in inside:
                inside[computation].add(opcode)
            else:
                size = max(map(_bytes, _ARRAY.findall(match[1])), default=0)
                found.append(Instruction(opcode, match[1], size, line.strip()))
    return [_as_move(instruction, inside) for instruction in found]


def _as_move(instruction: Instruction, inside: dict[str, set[str]]) -> Instruction:
    called = _CALLED.search(instruction.text)
    opcodes = inside.get(called[1], set()) if instruction.opcode == "fusion" and called else set()
    moves = opcodes & COPIES
    return replace(instruction, opcode=min(moves)) if moves and opcodes <= COPIES | NOT_MOVES else instruction


def _bytes(array: tuple[str, str]) -> float:
    kind, dims = array
    return prod(int(n) for n in dims.split(",") if n) * NUM_BYTES.get(kind, 4)


def large_copies(text: str, least_bytes: float, types: set[str]) -> list[str]:
    """Every copy, transpose or change of type, of at least so many bytes of these types, within the main memory."""
    return [
        i.text[:300]
        for i in instructions(text)
        if i.opcode in COPIES
        and "S(1)" not in i.arrays
        and i.num_bytes >= least_bytes
        and i.arrays.lstrip("(").split("[")[0] in types
    ]


def collectives(text: str) -> list[Instruction]:
    """Every collective; those of a loop's body are there once."""
    return [i for i in instructions(text) if i.opcode in COLLECTIVES]


def round_bytes(text: str, num_pieces: int) -> float:
    """Bytes that one round of a decode program reads from and writes to the chip's main memory, its KV pages left out.

    Every instruction of the loop over rounds, and `num_pieces` times those of the sampler's loop inside; of branches
    the cheapest, which is what a row without cuts and penalties takes. Attention is a kernel of our own: it reads
    the pages it is told to, which no text says.
    """
    computations = _computations(text)
    fused = {name: {opcode for _, _, opcode, _ in lines} for name, lines in computations.items()}
    sizes = {name: _main_memory(made) for lines in computations.values() for name, made, _, _ in lines}

    def cost(name: str, pieces: int) -> float:
        return sum(one(*line, pieces) for line in computations[name])

    def one(name: str, made: str, opcode: str, rest: str, pieces: int) -> float:
        operands = [sizes.get(operand, 0.0) for operand in _OPERAND.findall(rest.split("), ", 1)[0])]
        inside = fused.get(called[1], set()) if (called := _CALLED.search(rest)) else {opcode}
        if opcode in FREE or "paged_attention" in name:
            return 0.0
        if opcode == "while":
            return pieces * cost(_BODY.findall(rest)[0], 1)
        if opcode == "conditional":
            return min(cost(branch, 1) for branch in _OPERAND.findall(_BRANCHES.findall(rest)[0]))
        if opcode in {"copy-start", "slice-start"}:  # (target, source) or ((source), target): the smaller is what moves
            moved = sorted((_bytes(array[:2]), "S(1)" in array[2]) for array in _placed(made) if array[1])[:2]
            return moved[0][0] * sum(not is_near for _, is_near in moved)
        if inside & PARTIAL:
            largest = max([sizes[name], *operands])
            return 2 * sum(size for size in [sizes[name], *operands] if size < largest)
        return sizes[name] + sum(operands)

    entry = next(lines for name, lines in computations.items() if f"ENTRY %{name} " in text)
    rounds = [_BODY.findall(rest)[0] for _, _, opcode, rest in entry if opcode == "while"]
    return max(cost(body, num_pieces) for body in rounds)


def _computations(text: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """Every computation's instructions: name, what it makes, opcode, and the rest of the line."""
    found: dict[str, list[tuple[str, str, str, str]]] = {}
    lines: list[tuple[str, str, str, str]] = []
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            lines = found[begin[1]] = []
        elif match := re.match(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)", line):
            lines.append((match[1], match[2], match[3], match[4]))
    return found


def _placed(made: str) -> list[tuple[str, str, str]]:
    return re.findall(_ARRAY.pattern + _LAYOUT, made)


def _main_memory(made: str) -> float:
    return sum(_bytes((kind, dims)) for kind, dims, layout in _placed(made) if "S(1)" not in layout)


def num_aliased(text: str) -> int:
    """How many inputs an output takes the memory of."""
    header = text.split("\n", 1)[0]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry", header)
    return found[1].count(": (") if found else 0
