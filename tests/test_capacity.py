"""`quire plan` before there is a slice: names of topologies, bytes from shapes, time from data sheets."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from quire.capacity import compiled, measure
from quire.capacity.chips import CHIPS, chip_of_device
from quire.capacity.footprint import described_programs, device_bytes, footprint, work_of
from quire.capacity.model_file import read_model_config
from quire.capacity.roofline import LayerKinds, Work, decode_step, prefill_step
from quire.capacity.topology import parse_topology
from quire.cli import doctor, main
from quire.cli.doctor import compare
from quire.config import EngineConfig, ExpertsConfig
from quire.device import native
from quire.device.attention.xla import XlaBackend
from quire.device.mesh import make_mesh, sharding
from quire.field_error import FieldError
from tests.tiny import tiny_config

CONFIGS = Path(__file__).parent.parent / "bench" / "configs"
LLAMA_8B, LLAMA_70B, QWEN_32B = (CONFIGS / f"{name}.json" for name in ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-32B"))


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v5e:2x2", "v5e:2x2", 4, 4),
        ("v6e:4x4", "v6e:4x4", 16, 16),
        ("v5p:2x2x1", "v5p:2x2x1", 4, 4),
        ("tpu7x:2x2x1", "v7x:2x2x1", 4, 8),  # two devices a chip
        ("v7x:2x2x1", "v7x:2x2x1", 4, 8),
        ("h100:8", "h100:8", 8, 8),
    ],
)
def test_a_topology_by_its_name(text, name, chips, devices):
    topology = parse_topology(text)
    assert (topology.name, topology.num_chips, topology.num_devices) == (name, chips, devices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v9:2x2", "'v9' is none of the chips v5e, .*; give one such as v5e:2x2 for 4 chips, v6e:2x4"),
        ("v6e", "it needs the number of chips along each axis; give one such as v6e:2x4"),
        ("v6e:2xtwo", "it needs the number of chips"),
        ("v6e:", "it needs the number of chips"),
        ("v6e:²x2", "it needs the number of chips"),
        ("v6e:8", "v6e has 2 axes, and this names 1; give one such as v6e:2x4"),
        ("tpu7x:2x2", "tpu7x has 3 axes, and this names 2; give one such as tpu7x:2x2x1"),
        ("h100:2x4", "h100 has 1 axis, and this names 2; give one such as h100:8"),
        ("h100:16", "16 chips: from 1 to 8 are allowed"),
        ("v6e:0x4", "0 chips: from 1 to 256 are allowed"),
        ("v6e:9999x9999", "99,980,001 chips"),
    ],
)
def test_a_wrong_topology_is_refused_with_one_that_would_do(text, says):
    with pytest.raises(FieldError, match=says) as error:
        parse_topology(text)
    assert error.value.field == "topology"
    assert repr(text) in str(error.value)


def test_every_chip_says_where_its_numbers_are_from():
    for chip in CHIPS.values():
        assert any(source.startswith("https://") for source in chip.sources), chip.name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "v7x"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name):
    chip = chip_of_device(kind)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA H100 PCIe"])
def test_a_device_that_is_not_in_the_table_is_no_chip(kind):
    assert chip_of_device(kind) is None


def test_rings_carry_twice_what_lines_do():
    line, ring = parse_topology("v6e:4x4"), parse_topology("v6e:16x16")
    assert line.link_bandwidth == 2 * 100e9  # a corner has two neighbours
    assert ring.link_bandwidth == 4 * 100e9  # every chip has four
    assert parse_topology("v6e:1x1").all_reduce_seconds(1 << 30) == 0


def test_a_large_all_reduce_takes_its_bytes_and_a_small_one_its_hops():
    slice_ = parse_topology("v6e:2x2")
    assert slice_.all_reduce_seconds(10**9) == pytest.approx(2 * 3 / 4 * 1e9 / 200e9)
    assert slice_.all_reduce_seconds(1) == pytest.approx(4e-6)  # one hop along each of two axes, and back


def work(**changes) -> Work:
    fields = {
        "matmul_bytes": 16 * 10**9,
        "matmul_params": 8 * 10**9,
        "unembed_params": 5 * 10**8,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "itemsize": 2,
        "layers": (LayerKinds(count=32, kv_bytes_per_token=4096, num_heads=32, head_dim=128, window=None),),
    }
    return Work(**(fields | changes))


def test_decoding_few_rows_is_bound_by_reading_the_weights():
    time = decode_step(work(), parse_topology("v6e:1x1"), rows=1, context=1024)
    read = 16e9 + 32 * 1024 * 4096 + 2 * 128_000 * 4  # weights, KV, logits written and read
    assert time.limit == "memory"
    assert time.seconds == pytest.approx(read / 1638e9)
    assert time.tokens_per_second == pytest.approx(1638e9 / read)
    assert time.interconnect == 0


def test_a_long_prompt_is_bound_by_arithmetic():
    time = prefill_step(work(), parse_topology("v6e:1x1"), tokens=4096)
    pairs = 4096 * 4097 // 2
    flops = 2 * (4096 * 75 * 10**8 + 5 * 10**8) + 4 * 32 * pairs * 32 * 128
    assert time.limit == "compute"
    assert time.seconds == pytest.approx(flops / 918e12)


def test_a_window_bounds_what_is_read():
    windowed = work(layers=(LayerKinds(count=32, kv_bytes_per_token=4096, num_heads=32, head_dim=128, window=512),))
    one = parse_topology("v6e:1x1")
    short = decode_step(windowed, one, rows=8, context=512)
    assert decode_step(windowed, one, rows=8, context=100_000) == short
    assert decode_step(work(), one, rows=8, context=100_000).seconds > short.seconds


def test_two_all_reduces_a_layer_and_one_for_the_embedding():
    slice_ = parse_topology("v6e:2x2")
    time = decode_step(work(), slice_, rows=64, context=1)
    assert time.interconnect == pytest.approx(65 * slice_.all_reduce_seconds(64 * 4096 * 2))


def test_a_device_of_two_on_a_chip_has_half_of_its_bandwidth():
    time = decode_step(work(), parse_topology("tpu7x:1x1x1"), rows=1, context=0)
    assert time.memory == pytest.approx((16e9 + 2 * 128_000 * 4) / (7380e9 / 2))


def test_of_experts_a_step_reads_and_multiplies_those_that_its_tokens_take():
    """Three quarters of the weights are experts, of which a token takes a tenth."""
    moe = work(expert_bytes=12 * 10**9, expert_params=6 * 10**9, expert_share=0.1)
    assert moe.bytes_read(1) == pytest.approx(4e9 + 1.2e9)
    assert moe.bytes_read(2) == pytest.approx(4e9 + 12e9 * 0.19)
    assert moe.bytes_read(1000) == pytest.approx(16e9)
    assert moe.params_per_token == pytest.approx(2e9 + 0.6e9)
    assert work().bytes_read(1) == 16e9


def test_experts_are_counted_from_the_shapes_of_their_weights():
    model = tiny_config(
        "qwen3_moe", experts=ExpertsConfig(num_experts=8, num_experts_per_token=2, intermediate_size=24)
    )
    slice_ = parse_topology("v6e:2x2")
    found = work_of(described_programs(EngineConfig(), model, slice_, max_model_len=64))
    assert found.expert_params == 2 * 8 // 4 * 3 * 32 * 24  # two layers; two experts a device; gate, up and down
    assert (found.expert_bytes, found.expert_share) == (2 * found.expert_params, 0.25)


# -- bytes, from shapes ----------------------------------------------------------------------------------------------


def memory_of(path, topology, **knobs):
    model, config, slice_ = read_model_config(path), EngineConfig(**knobs), parse_topology(topology)
    programs = described_programs(config, model, slice_, max_model_len=model.max_len)
    return footprint(programs, config, slice_, max_model_len=model.max_len), programs


def num_weights(model):
    attention, width, ffn = model.attention[0], model.hidden_size, model.intermediate_size
    heads = 2 * attention.num_heads * attention.head_dim + 2 * attention.num_kv_heads * attention.head_dim
    split = model.num_layers * (width * heads + 3 * width * ffn) + 2 * model.vocab_size * width
    return split, (2 * model.num_layers + 1) * width


@pytest.mark.slow
def test_weights_are_split_and_norms_are_not(tmp_path):
    split, norms = num_weights(read_model_config(LLAMA_8B))
    assert split + norms == 8_030_261_248  # what its authors count
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(LLAMA_8B.read_text()) | {"vocab_size": 1 << 17}))  # needs no padding
    split, norms = num_weights(read_model_config(path))
    for topology, devices in (("v6e:1x1", 1), ("v6e:2x2", 4), ("h100:2", 2), ("tpu7x:2x2x1", 8)):
        assert memory_of(path, topology)[0].weights == 2 * (split // devices + norms), topology


@pytest.mark.slow
def test_scarce_kv_heads_are_on_more_than_one_device():
    memory, programs = memory_of(LLAMA_70B, "v6e:4x4", num_pages=1000)
    work = work_of(programs)
    (layers,) = work.layers
    assert (layers.num_heads, layers.kv_bytes_per_token) == (4, 2 * 128 * 2)  # 8 KV heads over 16 devices: one each
    assert memory.pool == 1000 * (16 * 80 * 2 * 128 * 2) + device_bytes(programs.cache_of(1000).tokens_MZ)


def test_the_pool_has_the_pages_that_the_engine_would_take():
    memory, programs = memory_of(LLAMA_8B, "v6e:2x2", max_num_seqs=4)
    page = 2 * 32 * 8 // 4 * 128 * 16 * 2 + 16 * 4  # K and V of two heads a device in every layer, and the ids
    assert memory.num_pages == 4 * 131_072 // 16
    assert memory.pool == memory.num_pages * page == device_bytes(programs.cache_of(memory.num_pages))


def test_what_no_memory_holds_has_no_pages():
    memory, _ = memory_of(LLAMA_70B, "v5e:2x2")
    assert memory.weights > parse_topology("v5e:2x2").chip.device_memory
    assert (memory.num_pages, memory.pool) == (0, 0)


@pytest.mark.slow
def test_int8_halves_what_is_read():
    whole, half = (work_of(memory_of(LLAMA_8B, "v6e:1x1", quantize=kind)[1]) for kind in (None, "int8"))
    assert half.matmul_params == whole.matmul_params
    assert half.matmul_bytes == pytest.approx(whole.matmul_bytes / 2, rel=0.01)


def test_int4_weights_take_a_quarter_of_a_layer():
    whole, packed = (memory_of(LLAMA_8B, "v6e:1x1", quantize=kind)[1].params for kind in (None, "int4-weights"))
    share = device_bytes(packed["layers"]) / device_bytes(whole["layers"])
    assert share == pytest.approx((0.5 + 4 / 128) / 2, rel=0.01)  # half a byte, and a float32 scale for each 128


@pytest.mark.slow
def test_work_of_one_device_of_four():
    work = work_of(memory_of(QWEN_32B, "v6e:2x2")[1])
    (layers,) = work.layers
    assert (layers.count, layers.num_heads, layers.kv_bytes_per_token) == (64, 16, 2 * 2 * 128 * 2)
    assert work.vocab_size == 298 * 128 >= 151_936 // 4  # padded to whole tiles


def test_a_tied_output_head_takes_no_memory_and_is_read():
    config, slice_ = EngineConfig(dtype="float32"), parse_topology("h100:1")
    tied, untied = (
        described_programs(config, tiny_config(tie_embeddings=tie), slice_, max_model_len=64) for tie in (True, False)
    )
    head = device_bytes(untied.params["unembed"])
    memory = [footprint(programs, config, slice_, max_model_len=64).weights for programs in (tied, untied)]
    assert memory[1] - memory[0] == head
    assert work_of(tied) == work_of(untied)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [  # what libtpu 0.0.50.1 took for such arguments
        ("bfloat16", (4096,), 8192),
        ("bfloat16", (8, 1000, 16, 128), 32_768_000),
        ("bfloat16", (8, 1000, 16, 64), 16_777_216),
        ("bfloat16", (3, 1000, 4, 128), 3_072_000),
        ("int32", (1000, 16), 65_536),
        ("float32", (3, 768), 12_288),
        ("int8", (4096, 2, 100), 851_968),
        ("int4", (128, 256), 16_384),
        ("uint32", (64, 2), 1024),
        ("int32", (), 512),
    ],
)
def test_a_tpu_keeps_arrays_in_tiles(dtype, shape, num_bytes):
    programs = described_programs(EngineConfig(), tiny_config(), parse_topology("v6e:1x1"), max_model_len=64)
    assert device_bytes(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding(programs.mesh))) == num_bytes


# -- the command -----------------------------------------------------------------------------------------------------


CONTRACT = {
    "weights_bytes_per_chip": int,
    "pool_bytes_per_chip": int,
    "temp_bytes_per_chip": int,
    "code_bytes_per_chip": int,
    "headroom_bytes_per_chip": int,
    "memory_bytes_per_chip": int,
    "fits": bool,
    "decode_tokens_per_s": float,
    "prefill_tokens_per_s": float,
    "sequences_by_context": dict,
    "collectives": dict,
    "source": str,
}


def plan(capsys, *args):
    code = main(["plan", *map(str, args), "--json", "-"])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_the_last_line_is_one_json_object(capsys):
    code, out, report = plan(capsys, LLAMA_70B, "--topology", "v6e:2x4", "--no-compile")
    assert code == 0
    for name, kind in CONTRACT.items():
        assert type(report[name]) is kind, name
    parts = sum(report[f"{name}_bytes_per_chip"] for name in ("weights", "pool", "temp", "code", "headroom"))
    assert parts == report["memory_bytes_per_chip"]
    assert report["collectives"]["all_reduces_per_step"] == 161
    assert list(report["sequences_by_context"]) == ["1024", "4096", "8192", "32768", "131072"]
    assert [entry["rows"] for entry in report["decode"]] == [1, 8, 32, 64, 128, 256]
    assert all(entry["limit"] in ("memory", "compute", "interconnect") for entry in report["decode"])
    assert "An upper bound" in out
    assert "no measurement" in out
    assert "estimated from shapes: --no-compile" in out
    assert "https://docs.cloud.google.com/tpu/docs/v6e" in out


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_is_an_exit_code(capsys):
    code, out, report = plan(capsys, LLAMA_70B, "--topology", "v5e:2x2", "--no-compile")
    assert code == 1
    assert report["fits"] is False
    assert report["headroom_bytes_per_chip"] < 0
    assert "it does not fit, not even its weights: take more chips" in out


@pytest.mark.slow
def test_bytes_of_a_chip_are_those_of_its_devices(capsys):
    _, _, two = plan(capsys, LLAMA_8B, "--topology", "tpu7x:1x1x1", "--no-compile", "--num-pages", "1000")
    _, _, one = plan(capsys, LLAMA_8B, "--topology", "h100:2", "--no-compile", "--num-pages", "1000")
    assert two["devices"] == one["devices"] == 2
    assert two["weights_bytes_per_chip"] == 2 * one["weights_bytes_per_chip"]


@pytest.mark.slow
def test_the_engines_knobs_are_the_plans(capsys):
    _, _, plain = plan(capsys, QWEN_32B, "--topology", "h100:8", "--no-compile")
    knobs = ("--quantize", "int8", "--max-num-seqs", "16", "--num-pages", "512", "--max-model-len", "4096")
    _, _, changed = plan(capsys, QWEN_32B, "--topology", "h100:8", "--no-compile", *knobs)
    assert changed["weights_bytes_per_chip"] < 0.6 * plain["weights_bytes_per_chip"]
    assert changed["num_pages"] == 512
    assert changed["sequences_by_context"] == {"1024": 8, "4096": 2}


def test_sequences_are_counted_in_the_windows_too(capsys, tmp_path):
    """Where every layer has a window, the pages of the first pool are token ids and say nothing of what fits."""
    path = tmp_path / "config.json"
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    path.write_text(json.dumps(json.loads(LLAMA_8B.read_text()) | mistral | {"rope_scaling": None}))
    _, out, report = plan(capsys, path, "--topology", "v6e:1x1", "--no-compile", "--max-model-len", "32768")
    (window,) = report["windows"]
    assert window["window"] == 4096
    assert f"+ {window['num_pages']:,} for windows of 4,096" in out
    in_window = {"1024": 64, "4096": 256, "8192": 257, "32768": 257}
    counts = {length: window["num_pages"] // pages for length, pages in in_window.items()}
    assert report["sequences_by_context"] == counts
    assert f"the pool holds {counts['1024']:,} such rows" in out


@pytest.mark.slow
def test_a_folder_with_only_a_config_and_a_file_of_json_are_the_same(capsys, tmp_path):
    (tmp_path / "config.json").write_text(LLAMA_8B.read_text())
    args = ("--topology", "v6e:1x1", "--no-compile")
    reports = [plan(capsys, path, *args)[2] for path in (tmp_path, tmp_path / "config.json", LLAMA_8B)]
    for report in reports:
        del report["model"]
    assert reports[0] == reports[1] == reports[2]


@pytest.mark.slow
def test_json_goes_to_a_file(capsys, tmp_path):
    args = ["plan", str(LLAMA_8B), "--topology", "v6e:1x1", "--no-compile", "--json", str(tmp_path / "plan.json")]
    assert main(args) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True
    assert "{" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((LLAMA_8B, "--topology", "v6e"), "topology='v6e': after a colon it needs the number of chips"),
        (("nowhere", "--topology", "v6e:1x1"), "MODEL 'nowhere' is not on disk; give a folder with config.json"),
        (("src", "--topology", "v6e:1x1"), "MODEL 'src' has no config.json"),
        (("nowhere", "--topology", "v6e:1x1", "--json", "no/such/x.json"), "json='no/such/x.json': there is no folder"),
        ((LLAMA_8B, "--topology", "v6e:1x1", "--max-model-len", "200000"), "is more than the model's own 131072"),
        ((LLAMA_8B, "--topology", "v6e:1x1", "--dtype", "int3"), "dtype='int3' must be one of"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(args, says, capsys):
    assert main(["plan", *map(str, args), "--no-compile"]) == 2
    assert says in capsys.readouterr().err


# -- the compiler, where there is none -------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_the_compiler_the_plan_says_so(capsys, monkeypatch):
    monkeypatch.setitem(compiled.MODULES, "tpu", "a_compiler_that_is_not_installed")
    _, out, report = plan(capsys, LLAMA_8B, "--topology", "v6e:1x1")
    assert report["source"] == "formula"
    assert report["programs"] == []
    assert "the compiler for v6e is not installed" in report["why_not_compiled"]
    assert "estimated from shapes: the compiler for v6e is not installed" in out


def plan_with_compiler(capsys, monkeypatch, program):
    """The plan where the process that compiles runs this program instead."""
    monkeypatch.setitem(compiled.MODULES, "tpu", "json")  # something is importable, and yet no libtpu
    monkeypatch.setattr(compiled, "COMMAND", ("-c", program))
    code, out, report = plan(capsys, LLAMA_8B, "--topology", "v6e:1x1")
    assert report["source"] == "formula"
    assert [program["name"] for program in report["programs"]] == ["decode", "mixed"]
    assert "the decode program did not compile" in out
    return code, out, report


@pytest.mark.slow
def test_a_compiler_that_dies_is_an_answer(capsys, monkeypatch):
    abort = "import os; os.write(2, b'E1 Check failed: x\\n'); os.abort()"
    code, out, report = plan_with_compiler(capsys, monkeypatch, abort)
    assert (code, report["fits"]) == (1, False)
    assert "it does not run: the compiler refuses a program" in out
    assert "E1 Check failed: x" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("Mosaic failed to compile the kernel", "it does not run: the compiler refuses a program"),
        ("RESOURCE_EXHAUSTED: ran out of memory in memory space hbm", "it does not fit: take more chips"),
    ],
)
def test_a_program_that_the_compiler_refuses_does_not_run(error, says, capsys, monkeypatch):
    refuse = f"""if True:
        from unittest.mock import Mock
        from quire.capacity import compiled, footprint
        compiled.described_devices = lambda topology: None
        footprint.programs_on = lambda *args, **kwargs: Mock(trace=Mock(side_effect=RuntimeError({error!r} "\\nmore")))
        compiled.main()
    """
    code, out, report = plan_with_compiler(capsys, monkeypatch, refuse)
    assert (code, report["fits"]) == (1, False)
    assert says in out
    assert f"did not compile: RuntimeError: {error}\n" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "limit", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 600, "it ended with code -9"),
        ("import a_compiler_that_is_not_installed", 600, "ModuleNotFoundError: No module named"),
        ("import signal; signal.pause()", 0.1, "the compiler was stopped after 0.1 s"),
    ],
)
def test_without_an_answer_of_the_compiler_the_estimate_holds(program, limit, reason, capsys, monkeypatch):
    monkeypatch.setattr(compiled, "TIMEOUT_S", limit)
    code, out, report = plan_with_compiler(capsys, monkeypatch, program)
    assert (code, report["fits"]) == (0, True)
    assert "it fits by the estimate from shapes; whether every program compiles is not known" in out
    assert reason in out


def test_only_the_compiler_for_gpus_gets_a_flag_for_gpus(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    tpu, gpu = (compiled.environment(parse_topology(name))["XLA_FLAGS"] for name in ("v6e:1x1", "h100:1"))
    assert tpu == "--xla_dump_to=x"  # a compiler aborts on a flag that it does not know
    assert gpu == f"--xla_dump_to=x {compiled.XLA_FLAG}"


def test_collectives_are_counted_by_what_they_move():
    program = """
      %a = bf16[64,8192]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=1
      %b = (bf16[64,8192]{1,0}, bf16[64,8192]{1,0}) all-reduce-start(%y)
      %c = f32[64]{0:T(128)} all-reduce(%z)
      %d = f32[8,16032,64]{1,2,0} all-gather(%w)
    """
    assert compiled.count_collectives(program, 64 * 8192) == {"all-reduce": 2, "all-gather": 1}


# -- on a device ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_a_kernel_that_is_right_is_told_from_one_that_is_not(monkeypatch):
    mesh = make_mesh()
    checks = measure.check_kernels(mesh, ("xla",))
    assert [(check.backend, check.dtype, check.head_dim, check.window, check.is_right) for check in checks] == [
        ("xla", dtype, *form, True) for dtype in ("float32", "bfloat16") for form in ((128, None), (64, 20))
    ]
    honest = XlaBackend.write_and_attend

    def reads_one_position_too_few(self, kv, q, k, v, layout, *more):
        return honest(self, kv, q, k, v, replace(layout, kv_lens_B=layout.kv_lens_B - 1), *more)

    monkeypatch.setattr(XlaBackend, "write_and_attend", reads_one_position_too_few)
    assert not any(check.is_right for check in measure.check_kernels(mesh, ("xla",)))


@pytest.mark.slow
@pytest.mark.nightly  # tests/device/test_pallas.py tries the kernel itself
def test_the_kernel_for_tpus_is_right_in_the_interpreter():
    for check in measure.check_kernels(make_mesh(), ("pallas",)):
        assert check.backend == "pallas"
        assert check.is_right, check


@pytest.mark.slow
def test_a_step_and_the_memory_are_measured():
    mesh = make_mesh()
    assert measure.decode_seconds(measure.SMALL, mesh) > 0
    assert measure.memory_bandwidth(jax.devices()[0], 1 << 16) > 0
    planned = measure.planned_decode(measure.SMALL, mesh, parse_topology("v6e:1x1"))
    assert planned.num_tokens == measure.SMALL.rows


def test_a_device_that_does_what_was_planned_is_told_from_one_that_does_not():
    planned = {"bandwidth": 1638e9, "decode_step_s": 1e-3, "memory": 31 << 30}
    good = compare(planned, {"bandwidth": 1400e9, "decode_step_s": 1.5e-3, "memory": int(31.2 * 2**30)})
    assert good == [
        "memory: 31.20 GiB, planned 31.00: as planned",
        "bandwidth: 85% of the data sheet's 1,638 GB/s",
        "decode step: 67% of the speed of the roofline",
    ]
    bad = compare(planned, {"bandwidth": 400e9, "decode_step_s": 9e-3, "memory": 15 << 30})
    assert [line.endswith("report it") for line in bad] == [True, True, True]


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ({"verdicts": ["bandwidth: 85% of the data sheet's 1,638 GB/s"], "native": "not built"}, 0),
        ({"verdicts": ["memory: 15.00 GiB, planned 31.00: not as planned, report it"]}, 1),
        ({"native": "does not load"}, 1),
    ],
    ids=str,
)
def test_a_failed_check_is_the_exit_status_of_the_doctor(report, status, capsys, monkeypatch):
    for part in ("_devices", "_try_it", "_kernels"):
        monkeypatch.setattr(doctor, part, lambda made: None)
    monkeypatch.setattr(doctor, "_measure", lambda made: made.update(report))
    assert main(["doctor"]) == status
    out = capsys.readouterr()
    assert "quire runs here." in out.out
    assert ("quire: failed checks: " in out.err) == bool(status)
    assert "not installed" not in out.out, "the packages that it lists are those that Quire needs, and Quire itself"


def test_the_report_has_no_text_of_an_error(capsys, monkeypatch, tmp_path):
    library = tmp_path / "_native.so"
    library.write_text("no library")
    monkeypatch.setattr(native, "LIBRARY", library)
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)

    def fail(report):
        raise OSError(f"cannot read {tmp_path}")

    monkeypatch.setattr(doctor, "_try_it", fail)
    assert main(["doctor", "--json", str(tmp_path / "report.json")]) == 1
    text = (tmp_path / "report.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["error"] == "OSError"
    assert json.loads(text)["native"] == "does not load"
    out = capsys.readouterr()
    assert f"native       the native library does not load, build it again: {library}" in out.out
    assert f"quire does not run here: OSError: cannot read {tmp_path}" in out.err
