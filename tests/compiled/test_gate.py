"""Every program that runs on an accelerator, as its real compiler makes it: no TPU and no GPU is at hand.

What a compiled program says cannot be seen any earlier: in what order it keeps each array, and what it copies because
two instructions want two orders.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compiled import hlo
from tests.compiled.report import MODELS
from tests.compiled.topology import reports_of

pytestmark = pytest.mark.slow

MAX_TEMPORARIES = 64e6
"""Beyond the logits."""
TARGETS = {("v5e:1x1", 1): ["smollm2"], ("v5e:2x2", 4): ["llama-8b", "qwen3-moe"]}
"""What CI has the time for; `python -m tests.compiled.report` compiles any model for any slice."""


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, int], list[dict]]:
    """All targets, two at a time (`report --all` compiles every step shape of any model)."""
    with ThreadPoolExecutor(2) as pool:
        jobs = {
            (topology, chips): pool.submit(reports_of, "report", topology, str(chips), *models)
            for (topology, chips), models in TARGETS.items()
        }
        return {target: job.result() for target, job in jobs.items()}


@pytest.fixture(params=[*TARGETS], ids=lambda target: f"{target[0]} {target[1]}")
def programs(request, reports) -> list[dict]:
    return reports[request.param]


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
    """Maxima, sums and alternatives of the sampler: together no more than an eighth of the logits."""
    for p in programs:
        assert p["other_collective_bytes"] <= p["logits"] / 8, (p["model"], p["program"], p["collectives"])


def test_a_write_that_copies_the_pool_is_seen():
    """The planted regression: the head as an axis of its own in the scatter."""
    (found,) = reports_of("report", "v5e:1x1", "1", "llama-8b", "--planted")
    assert len(found["copies"]) >= 2 * MODELS["llama-8b"].num_layers
    assert found["temporaries"] > MAX_TEMPORARIES + found["logits"]


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
