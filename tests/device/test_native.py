"""Who gets the native library: the CPU that has it. Who does not is told why, and served by XLA."""

import pytest

from quire.device import native
from quire.device.attention import choose_backend
from quire.device.attention import native as backend
from tests.tiny import tiny_config, tiny_llm

built = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))


def test_it_was_built_with_the_package():
    """The tests below would be skipped in silence."""
    assert native.unavailable_reason() is None


@built
def test_auto_is_native_on_a_cpu_and_not_elsewhere():
    assert choose_backend("auto", tiny_config(), "cpu", "cpu") == ("native", None)
    assert choose_backend("auto", tiny_config(), "gpu", "NVIDIA H100") == ("xla", None)
    for platform in ("tpu", "gpu"):
        with pytest.raises(ValueError, match=f"attention='native'.* not on a {platform}; attention='auto'"):
            choose_backend("native", tiny_config(), platform, "")
    assert choose_backend("xla", tiny_config(), "cpu", "cpu") == ("xla", None)


def test_a_head_size_it_does_not_know_is_served_by_xla():
    config = tiny_config(head_dim=12)
    name, reason = choose_backend("auto", config, "cpu", "cpu")
    assert name == "xla"
    assert "not 12" in str(reason)
    with pytest.raises(ValueError, match="multiple of 8, not 12"):
        choose_backend("native", config, "cpu", "cpu")


@pytest.mark.slow
def test_without_the_library_xla_serves_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
    native._load.cache_clear()
    try:
        assert native.instruction_sets() == ()
        with tiny_llm() as llm:
            (note,) = llm.engine.runner.notes
            assert note.startswith("attention runs in plain XLA, which is slower: ")
            assert "C++ compiler" in note
        with pytest.raises(ValueError, match=r"attention='native': .*C\+\+ compiler"):
            tiny_llm(attention="native")
        (tmp_path / "none.so").write_bytes(b"not a library")
        native._load.cache_clear()
        assert "does not load" in str(backend.unavailable_reason(tiny_config()))
    finally:
        native._load.cache_clear()


@built
def test_instruction_sets_are_named_from_the_plainest_on():
    names = native.instruction_sets()
    assert names[0] == "plain"
    assert set(names) <= {"plain", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"}
