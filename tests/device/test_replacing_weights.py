"""New weights take the place of the old ones array by array: memory never holds the model twice over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.device.mesh import make_mesh, place
from quire.device.models import weights
from quire.device.models.weights import params_from_tensors
from tests.effort import nightly
from tests.test_weights import aligned_copy
from tests.tiny import tiny_config, tiny_llm, tiny_tensors

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [(5 * i) % 90 + 1 for i in range(21)]

MEASURE = """
import json, sys
import jax, numpy as np
from pathlib import Path
from quire import LLM
from quire.device.models.weights import weight_specs
from tests.tiny import tiny_config

dtype, matmul, quantize = sys.argv[1:]
config = tiny_config(vocab_size=4096, hidden_size=1024, intermediate_size=4096, windows=(None,) * 4, num_heads=16,
                     num_kv_heads=16, head_dim=64)

def params():
    one = jax.tree.map(lambda spec: np.ones(spec.shape, np.float32), weight_specs(config))
    return jax.tree.map(lambda x: x.astype(jax.numpy.dtype(dtype)), one)

knobs = {"num_pages": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8, "matmul": matmul, "max_rounds": 1}
knobs |= {"quantize": quantize or None, "num_host_pages": 0, "preemption": "recompute", "compile_cache": ""}
llm = LLM.from_params(config, jax.tree.map(jax.numpy.asarray, params()), dtype=dtype, quiet=True, **knobs)
new = params()

def memory(name):
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024

llm.engine.set_weights(new, version=1)  # once without looking: what is compiled, and what the allocator keeps
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
llm.engine.set_weights(new, version=2)
sizes = [x.nbytes for x in jax.tree.leaves(new)]
print(json.dumps({"grown": memory("VmHWM") - before, "model": sum(sizes), "largest": max(sizes)}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the high-water mark of memory from /proc")
@pytest.mark.parametrize(
    ("dtype", "matmul", "quantize", "most"),
    [nightly("float32", "xla", "", 3), nightly("bfloat16", "auto", "", 2), ("bfloat16", "auto", "int8", 4)],
)
def test_memory_never_holds_the_model_twice_over(dtype, matmul, quantize, most):
    command = [sys.executable, "-c", MEASURE, dtype, matmul, quantize]
    # What is freed goes back at once: otherwise the allocator keeps it, and growth would be hidden by what was there.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert out.returncode == 0, out.stderr
    seen = json.loads(out.stdout)
    print(seen)
    # One array on its way to the device, and one made of it where that is not in the memory of the old one; int8 goes
    # through float32 in between.
    assert seen["grown"] < most * seen["largest"] < seen["model"]


def other_params(seed: int = 9):
    config = tiny_config()
    return params_from_tensors(config, tiny_tensors(config, seed=seed), mesh=make_mesh(), dtype="float32")


def greedy(llm) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([PROMPT], params, progress=False)[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["missing", "shape", "dtype", "extra", "donated"])
def test_bad_weights_change_nothing_however_late_the_fault_is(name):
    bad = other_params()
    layer = bad["layers"][-1]
    match name:
        case "missing":
            del layer["qkv"]
        case "shape":
            layer["qkv"] = layer["qkv"][:-1]
        case "dtype":
            layer["qkv"] = layer["qkv"].astype(np.float16)
        case "donated":
            layer["qkv"].delete()
        case "extra":
            layer["more"] = layer["qkv"]
    with tiny_llm() as llm:
        before = greedy(llm)
        with pytest.raises(ValueError, match=r"params\['layers'\]\[1\]\['(qkv|more)'\] is"):
            llm.engine.set_weights(bad, version=1)
        llm.engine.clear_prefix_cache()
        assert greedy(llm) == before


def test_a_failure_in_the_middle_leaves_no_mixture_and_the_next_weights_are_taken(monkeypatch):
    placed = []

    def place_five(*args):
        if len(placed) == 5:
            raise MemoryError("no room for this array")
        placed.append(place(*args))
        return placed[-1]

    with tiny_llm() as llm:
        new = other_params()
        with monkeypatch.context() as patch:
            patch.setattr(weights, "place", place_five)
            with pytest.raises(MemoryError):
                llm.engine.set_weights(new, version=1)
        with pytest.raises(RuntimeError, match="set_weights ended in the middle"):
            greedy(llm)
        assert llm.engine.stats().held_pages == 0
        llm.engine.set_weights(other_params(), version=1)
        got = greedy(llm)
    with tiny_llm() as fresh:
        fresh.engine.set_weights(other_params(), version=1)
        assert greedy(fresh) == got


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [nightly("float32"), "bfloat16"])
def test_borrowed_arrays_are_used_where_they_are_and_a_donated_one_is_told(dtype):
    """What the native library packs, in bfloat16, is a copy all the same."""
    config = tiny_config()

    def params(seed: int):
        return params_from_tensors(config, tiny_tensors(config, seed=seed), mesh=make_mesh(), dtype=dtype)

    with LLM.from_params(config, params(1), dtype=dtype, quiet=True, num_pages=64, max_num_seqs=2) as llm:
        first, new = greedy(llm), params(9)
        llm.set_weights(new, copy=False)
        got, norm = greedy(llm), new["layers"][1]["mlp_norm"]
        assert got != first
        assert llm.engine.runner.params["layers"][1]["mlp_norm"] is norm
        llm.set_weights(params(1))
        assert greedy(llm) == first
        assert not any(array.is_deleted() for array in jax.tree.leaves(new)), "what was borrowed is the caller's again"

        llm.set_weights(new, copy=False)
        norm.delete()
        with pytest.raises(RuntimeError, match="copy=False: call set_weights"):
            greedy(llm)
        assert llm.engine.stats().held_pages == 0
        llm.set_weights(params(9))
        assert greedy(llm) == got


def test_memory_of_numpy_is_never_borrowed():
    """Nobody would know of a change to it."""
    with tiny_llm() as llm:
        new = jax.tree.map(aligned_copy, other_params())
        llm.set_weights(new, copy=False)
        got = greedy(llm)
        jax.tree.map(lambda array: array.fill(0), new)
        llm.engine.clear_prefix_cache()
        assert greedy(llm) == got
