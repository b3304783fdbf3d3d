"""The pitfalls of the seeds' section 2.8 ("real bugs we hit"), each with a test that this code does not have it.

1, off by one after prefill: `core/test_scheduler.py::test_after_prefill_the_newest_token_has_no_kv_yet`.
3, all layers sharing one cache: `test_engine.py::test_every_layer_has_its_own_pages`.
4, indices of the wrong integer type: `device/test_attention.py::test_indices_of_another_integer_type_are_refused`.
The others are here.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.core.errors import AuditError
from quire.core.pages import PageAllocator
from quire.engine.packer import Packer
from quire.engine.step_shapes import step_shapes
from tests.core.fake import Arrivals, scheduler

SRC = Path(__file__).resolve().parents[1] / "src" / "quire"


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [9], [1, 30, 2]])
def test_pitfall_2_every_index_has_the_rank_its_reader_expects(lengths):
    """One bracket too many made a 2-D index that broke the gather."""
    arrive, s = Arrivals(), scheduler(num_pages=32, page_size=4, rows=8, budget=64)
    for length in lengths:
        s.add(arrive(length))
    shapes = step_shapes(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64))
    inputs = Packer(shapes, page_size=4, num_pages=[32]).pack(s.schedule())
    shape = inputs.shape
    assert inputs.tokens_T.shape == inputs.layout.positions_T.shape == inputs.layout.destinations_T.shape
    assert inputs.tokens_T.shape == (shape.num_tokens,)
    assert inputs.page_ids.cu_lens_B1.shape == (shape.num_rows + 1,)
    assert inputs.page_ids.ids_X.shape == (sum(-(-length // 4) for length in lengths),)
    assert inputs.layout.kv_lens_B.shape == (shape.num_rows,)
    assert inputs.layout.cu_q_lens_B1.shape == (shape.num_rows + 1,)
    assert inputs.samples.packed_index_S.shape == (shape.num_samples,)
    assert np.diff(inputs.layout.cu_q_lens_B1)[: len(lengths)].tolist() == lengths


def test_pitfall_5_the_free_list_cannot_grow_wrong_unseen():
    """A misspelt attribute grew another list: the audit compares the free list with every refcount."""
    pool = PageAllocator(4)
    pages = pool.allocate(2)
    pool._free.append(pages[0])
    with pytest.raises(AuditError, match=f"page {pages[0]}: refcount 1, 1 times in the free list"):
        pool.audit(pages)


def identifiers(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def test_pitfall_6_each_thing_has_one_name():
    """KVPool or KvPool, Req or Request: words that mean two things are not used for anything of ours."""
    words = (
        r"(^|_)slots?($|_)|block_(table|manager|id)|decode_?state|(?<!context)manager|(^|_)utils?($|_)|kv_?pool|^req$"
    )
    drift = re.compile(words, re.I)
    columns = [*(p for room in ("core", "device", "engine") for p in SRC.glob(f"{room}/**/*.py")), SRC / "llm.py"]
    found = {f"{path.name}: {name}" for path in columns for name in identifiers(path) if drift.search(name)}
    assert found <= {"sequence.py: __slots__", "tenants.py: __slots__"}, "Python's own word"


def test_pitfall_7_no_print_is_left_in_the_engine():
    """Debug prints in the attention forward: only commands, starts and ends, downloads and progress print."""
    printing = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "jax.debug.print")
    }
    allowed = {"following.py", "distributed/leader.py", "distributed/follower.py"}
    allowed |= {
        "llm.py",
        "progress.py",
        "checkpoint/hub.py",
        "capacity/compiled.py",  # answers on its own pipe
        "server/logs.py",  # to a terminal
    }
    assert {name for name in printing if not name.startswith("cli/")} == allowed
