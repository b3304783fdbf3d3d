"""Programs on the disk: a second start traces nothing, computes the same, and trusts nothing it should not."""

import os
import stat
from dataclasses import replace

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from quire import LLM, SamplingParams
from quire.config import WindowPoolSize, engine_config
from quire.device import saved_programs
from quire.device.mesh import make_mesh
from quire.device.programs import Programs
from quire.engine.step_shapes import step_shapes
from tests.tiny import tiny_config, tiny_params

KNOBS = {
    "dtype": "float32", "quiet": True,
    "num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_rounds": 4,
}  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]


@pytest.fixture
def cache(tmp_path, saves_programs):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    reset_cache()
    yield tmp_path / saved_programs.FOLDER
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture
def traced(monkeypatch):
    """The step shapes that have been traced."""
    shapes, trace = [], Programs.trace
    monkeypatch.setattr(Programs, "trace", lambda self, shape: (shapes.append(shape), trace(self, shape))[1])
    return shapes


def outputs(**knobs) -> list:
    """Tokens and log-probabilities, greedy, drawn, penalised and scored: of decoding and of mixed steps."""
    config = tiny_config()
    every = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=2),
        SamplingParams(temperature=0.9, seed=3, max_tokens=8, presence_penalty=0.5, prompt_logprobs=True),
    ]
    with LLM.from_params(config, tiny_params(config), **(KNOBS | knobs)) as llm:
        assert llm.engine.runner.num_compiles == 0
        return [
            (one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs)
            for params in every
            for one in llm.generate(PROMPTS, params, progress=False)
        ]


def test_a_second_start_traces_nothing_and_computes_the_same(cache, traced):
    first = outputs()
    assert len(traced) == len(list(cache.iterdir())) > 1
    traced.clear()
    assert outputs() == first
    assert traced == []


def engine_programs(**knobs) -> saved_programs.SavedPrograms:
    sizes = {"num_pages": 64, "page_size": 4, "pages_per_row": 8, "max_num_rows": 4, "max_rounds": 4}
    programs = Programs(knobs.pop("model", tiny_config()), make_mesh(), "float32", **(sizes | knobs))
    return saved_programs.SavedPrograms(programs)


def names(**knobs) -> set[str]:
    """Of the files that an engine's programs would have."""
    saved = engine_programs(**knobs)
    return {saved._path(shape).name for shape in step_shapes(engine_config(max_num_seqs=4, max_num_batched_tokens=16))}


def test_what_decides_a_program_is_in_its_name(cache, monkeypatch):
    first = names()
    assert len(first) > 1
    assert names() == first
    tiny = tiny_config()
    layers = [(*tiny.attention, replace(tiny.attention[-1], softmax_scale=scale)) for scale in (0.3, 0.4)]
    others = [
        names(page_size=8),
        names(max_rounds=2),
        names(attention="xla"),
        names(matmul="xla"),
        names(num_pages=65),
        names(windows=(WindowPoolSize(8, 16, 2),)),
        names(model=replace(tiny, norm_eps=1e-3)),
        *[names(model=replace(tiny, attention=attention)) for attention in layers],
    ]
    with jax.default_matmul_precision("highest"):
        others.append(names())
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        saved_programs._surroundings.cache_clear()
        others.append(names())
    with monkeypatch.context() as patch:
        patch.setattr(saved_programs, "_processor", lambda: "another machine")
        saved_programs._surroundings.cache_clear()
        others.append(names())
    saved_programs._surroundings.cache_clear()
    every = [first, *others]
    assert len(set().union(*every)) == sum(map(len, every)), "two that differ share a name"
    assert names() == first


def test_what_is_damaged_is_compiled_again(cache, traced, caplog):
    first = outputs()
    (victim, *others) = cache.iterdir()
    whole = victim.read_bytes()
    assert others
    for damaged in (whole[:-1], b"", bytes(40) + whole[40:]):
        victim.write_bytes(damaged)
        traced.clear()
        caplog.clear()
        assert outputs() == first
        assert len(traced) == 1
        assert "damaged" in caplog.text


def test_what_jax_has_in_its_own_cache_is_not_saved_again(cache, traced):
    """XLA would save it without its functions, and the next start would fail at its first step."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    first = outputs()
    for file in cache.iterdir():
        file.unlink()
    for _ in range(2):
        traced.clear()
        assert outputs() == first
        assert traced
    assert not list(cache.iterdir())


def test_after_an_upgrade_programs_are_saved_although_jax_has_the_same_in_its_cache(cache, traced, monkeypatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    first, saved = outputs(), len(list(cache.iterdir()))
    surroundings = saved_programs._surroundings()
    monkeypatch.setattr(saved_programs, "_surroundings", lambda: (*surroundings, "another version"))
    assert outputs() == first
    assert len(list(cache.iterdir())) == 2 * saved
    traced.clear()
    assert outputs() == first
    assert not traced


def test_what_this_jax_cannot_load_is_compiled_again(cache, traced, caplog, monkeypatch):
    first = outputs()
    traced.clear()

    def refuse(*args):
        raise RuntimeError("made for another machine")

    monkeypatch.setattr(saved_programs.serialize_executable, "deserialize_and_load", refuse)
    assert outputs() == first
    assert traced
    assert "made for another machine" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_used(cache, caplog, monkeypatch):
    shape = step_shapes(engine_config(max_num_seqs=4, max_num_batched_tokens=16))[0]
    saved = engine_programs()
    saved._path(shape).write_bytes(b"to be executed")
    assert saved.load(shape) is None
    assert "damaged" in caplog.text, "or it was not looked at"
    caplog.clear()
    monkeypatch.setattr(saved_programs.serialize_executable, "deserialize_and_load", None)
    for mode in (0o777, 0o770, 0o702):
        os.chmod(cache, mode)
        assert engine_programs().load(shape) is None
    assert caplog.text.count("others may write to it") == 3
    assert "damaged" not in caplog.text
    os.chmod(cache, 0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert engine_programs().load(shape) is None
    assert "belongs to another user" in caplog.text
    assert "damaged" not in caplog.text


def a_shape():
    return step_shapes(engine_config(max_num_seqs=4, max_num_batched_tokens=16))[0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o2777, 0o775, 0o1777, 0o755])
def test_folders_above_may_be_writable_by_others(tmp_path, cache, caplog, depth, mode):
    """As the volumes of containers are (`emptyDir` with `fsGroup`), and folders that were made with umask 002."""
    base = tmp_path / "a" / "b"
    base.mkdir(parents=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(base))
    (base / saved_programs.FOLDER).parents[depth - 1].chmod(mode)
    saved, shape = engine_programs(), a_shape()
    with saved_programs._opened(saved._folder) as folder:
        saved_programs._write(folder, saved._path(shape).name, b"to be executed")
    assert saved.load(shape) is None
    assert "damaged" in caplog.text, "or it was not looked at"
    assert "others may write to it" not in caplog.text


def test_a_folder_put_in_the_place_of_an_open_one_is_neither_read_nor_written(tmp_path, cache):
    engine_programs()
    (cache / "one.program").write_bytes(b"own")
    (cache / "one.program").chmod(0o600)
    with saved_programs._opened(cache) as folder:
        os.rename(cache, tmp_path / "elsewhere")
        cache.mkdir()
        (cache / "one.program").write_bytes(b"of another user")
        (cache / "one.program").chmod(0o600)
        assert saved_programs._read_own(folder, "one.program") == b"own"
        saved_programs._write(folder, "two.program", b"new")
    assert (tmp_path / "elsewhere" / "two.program").read_bytes() == b"new"
    assert [file.name for file in cache.iterdir()] == ["one.program"]


@pytest.mark.parametrize("change", ["folder", "owner", "link", "mode", "file", "linked file"])
def test_what_changes_after_the_start_is_not_loaded(tmp_path, cache, caplog, monkeypatch, change):
    """Each program is loaded after a check of its own: the folder may have been moved away since the first."""
    base = tmp_path / "a"
    base.mkdir(mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(base))
    saved, shape = engine_programs(), a_shape()
    path = saved._path(shape)
    path.write_bytes(b"to be executed")
    path.chmod(0o600)
    assert saved.load(shape) is None
    assert "damaged" in caplog.text, "or it was not looked at"
    caplog.clear()
    elsewhere = tmp_path / "elsewhere"
    if change == "folder":
        os.chmod(path.parent, 0o777)
    elif change == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif change == "link":
        os.rename(path.parent, elsewhere)
        path.parent.symlink_to(elsewhere)
    elif change == "mode":
        path.chmod(0o666)
    elif change == "file":
        real = os.fstat

        def of_another_user(descriptor: int) -> os.stat_result:
            status = real(descriptor)
            owner = os.geteuid() + stat.S_ISREG(status.st_mode)
            return os.stat_result((*status[:4], owner, *status[5:10]))

        monkeypatch.setattr(os, "fstat", of_another_user)
    else:
        os.rename(path, elsewhere)
        path.symlink_to(elsewhere)
    assert saved.load(shape) is None
    assert "damaged" not in caplog.text, "it was read"
    if change != "linked file":
        assert ("is a link" if change == "link" else "others may write to it") in caplog.text


def test_the_folder_is_bounded_and_the_longest_unused_go_first(cache, monkeypatch):
    engine_programs()
    for age in range(4):
        (cache / f"{age}.program").write_bytes(bytes(10))
        os.utime(cache / f"{age}.program", (age, age))
    monkeypatch.setattr(saved_programs, "MAX_BYTES", 25)
    with saved_programs._opened(cache) as folder:
        saved_programs._write(folder, "new.program", b"more")
    assert {file.name for file in cache.iterdir()} == {"3.program", "2.program", "new.program"}


def test_without_a_compile_cache_nothing_is_saved(tmp_path, saves_programs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        for shape in step_shapes(engine_config(max_num_seqs=4, max_num_batched_tokens=16)):
            assert engine_programs().load(shape) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert not list(tmp_path.iterdir())
