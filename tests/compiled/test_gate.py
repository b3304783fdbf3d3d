"""Every program that runs on an accelerator, as its real compiler makes it: no TPU and no GPU is at hand.

What a compiled program says cannot be seen any earlier: in what order it keeps each array, and what it copies because
two instructions want two orders.
"""

import functools

import pytest

from tests.compiled import hlo
from tests.compiled.report import MODELS
from tests.compiled.topology import reports_of
from tests.effort import nightly

pytestmark = pytest.mark.slow

MAX_TEMPORARIES = 64e6
"""Beyond the logits."""
SLICES = [
    ("v5e:1x1", 1),
    ("v5e:2x2", 4),
    ("v6e:1x1", 1),
    ("v6e:2x2", 4),
    ("tpu7x:2x2x1", 1),
    ("tpu7x:2x2x1", 4),
    ("h100", 1),
]
TARGETS = [
    ("v5e:1x1", 1, "smollm2"),
    ("v5e:2x2", 4, "llama-8b"),
    ("h100", 1, "smollm2"),
    nightly(("v5e:2x2", 4, "qwen3-moe")),
    *(nightly((*slice_, model, "--all")) for slice_ in SLICES for model in ("smollm2", "llama-8b")),
]
"""Slice, devices, model; the largest steps, or all shapes. `python -m tests.compiled.report` compiles any other."""

compiled = functools.cache(functools.partial(reports_of, "report"))


@pytest.fixture(params=TARGETS, ids=lambda target: " ".join(map(str, target)))
def programs(request) -> list[dict]:
    return compiled(*map(str, request.param))


def test_nothing_as_large_as_a_weight_or_a_pool_is_copied(programs):
    assert not [(p["model"], p["program"], p["copies"]) for p in programs if p["copies"]]


def test_temporaries_are_small(programs):
    too_large = [p for p in programs if p["temporaries"] > MAX_TEMPORARIES + p["logits"]]
    assert not [(p["model"], p["program"], p["temporaries"]) for p in too_large]


def test_every_donated_array_is_updated_in_place(programs):
    for p in programs:
        assert p["aliased"] == p["donated"], (p["model"], p["program"])
        assert p["donated"] > 0 or p["program"].endswith(" read")


def test_collectives_are_two_a_layer_and_one_for_the_embedding(programs, request):
    chips = request.node.callspec.params["programs"][1]
    for p in programs:
        is_step = p["logits"] > 0
        num_layers = MODELS[p["model"]].num_layers
        wanted = ["all-reduce"] * (2 * num_layers + 1) if is_step and chips > 1 else []
        assert p["large_collectives"] == wanted, (p["model"], p["program"], p["collectives"])


def test_what_else_chips_exchange_is_little(programs):
    """Maxima, sums and alternatives of the sampler: together no more than an eighth of the logits, or 64 kB.

    It takes a few rows at once, and says for those in every branch what this one needs: 54 kB of SmolLM2 on four chips,
    whose logits of eight rows are 393 kB on each.
    """
    for p in programs:
        assert p["other_collective_bytes"] <= max(p["logits"] / 8, 64e3 if p["logits"] else 0), (
            p["model"],
            p["program"],
            p["collectives"],
        )


def test_a_round_reads_every_weight_once_and_little_else(programs):
    """SmolLM2's logits fit into a chip's vector memory, from where the compiler moves them away and back for each piece
    of the sampler; beside all of its layers, and their KV, that is little."""
    for p in programs:
        if "round_bytes" in p and p["model"] != "smollm2":
            assert p["least_round_bytes"] <= 1.01 * p["round_bytes"], (p["model"], p["program"])
            assert p["round_bytes"] <= 1.3 * p["least_round_bytes"], (p["model"], p["program"])


def test_a_write_that_copies_the_pool_is_seen():
    """The planted regression: the head as an axis of its own in the scatter."""
    (found,) = reports_of("report", "v5e:1x1", "1", "llama-8b", "--planted")
    assert len(found["copies"]) >= 2 * MODELS["llama-8b"].num_layers
    assert found["temporaries"] > MAX_TEMPORARIES + found["logits"]
    assert found["round_bytes"] > 1.3 * found["least_round_bytes"]


def test_the_text_of_a_program_is_read_as_it_is_meant():
    text = """HloModule jit_f, input_output_alias={ {0}: (1, {}, may-alias), {1}: (2, {}) }, entry_computation_layout=x
%fused (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %t = bf16[8,8]{0,1} transpose(%p), dimensions={1,0}
  ROOT %n = bf16[8,8]{0,1} negate(%t)
}
%wrapped (p: bf16[8,8]) -> bf16[8,8] {
  %p.1 = bf16[8,8]{1,0} parameter(0)
  ROOT %t.1 = bf16[8,8]{0,1} transpose(%p.1), dimensions={1,0}
}
ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %f = bf16[8,8]{0,1} fusion(%a), kind=kLoop, calls=%fused
  %w = bf16[8,8]{0,1} fusion(%a), kind=kLoop, calls=%wrapped
  %c = bf16[8,8]{1,0:T(8,128)} copy(%f)
  %s = (bf16[8,8]{1,0:S(1)}, bf16[8,8]{1,0}, u32[]{:S(2)}) copy-start(%c)
  %l = f32[8,8]{1,0} copy(%x)
  %r = (bf16[4,8]{1,0}, bf16[2,2]{1,0}) all-reduce-start(%c), to_apply=%add
}"""
    assert [copy.split(" =")[0] for copy in hlo.large_copies(text, 128, {"bf16"})] == ["%w", "%c"]
    assert hlo.large_copies(text, 129, {"bf16"}) == []
    assert [(c.opcode, c.num_bytes) for c in hlo.collectives(text)] == [("all-reduce", 64)]
    assert hlo.num_aliased(text) == 1 + 1


def test_bytes_of_a_round_are_those_of_its_loop():
    text = """HloModule jit_f
%rows (p: f32[64,8], i: s32[4]) -> f32[4,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%p, %i), offset_dims={1}
}
%cheap (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}
%dear (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%b)
}
%piece (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  %e = f32[8]{0} exponential(%c)
  ROOT %d = f32[8]{0} conditional(%k, %e, %e), branch_computations={%cheap, %dear}
}
%round (w: bf16[16,16], x: f32[64,8]) -> f32[8] {
  %w = bf16[16,16]{1,0} parameter(0)
  %x = f32[64,8]{1,0} parameter(1)
  %near = (bf16[16,16]{1,0:S(1)}, bf16[16,16]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %near-done = bf16[16,16]{1,0:S(1)} copy-done(%near)
  %y = f32[8]{0} dot(%near-done, %w)
  %r = f32[4,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%rows
  %paged_attention.1 = f32[64,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %s = f32[8]{0} while(%y), condition=%never, body=%piece
}
ENTRY %main (w: bf16[16,16]) -> f32[8] {
  %z = f32[8]{0} negate(%q)
  ROOT %rounds = f32[8]{0} while(%z), condition=%never, body=%round
}"""
    brought_near, dot, gathered, exponential = 512, 512 + 32, 2 * (128 + 16), 32 + 32
    assert hlo.round_bytes(text, 3) == brought_near + dot + gathered + 3 * exponential
