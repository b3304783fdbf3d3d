"""Mistakes that people make: the message says what is wrong and what to do instead."""

import errno
import importlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, AsyncLLM, EngineConfig, Rollouts, SamplingParams, Structured, cli
from quire.cli import main
from tests.fake_llm import fake_llm
from tests.tiny import tiny_config

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


class State(dict):
    """As flax.nnx.State: a mapping of variables."""

    def to_pure_dict(self):
        return dict(self)


class PydanticLike:
    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def llm():
    with fake_llm() as made:
        yield made


CALLS = {
    "from_params of a state": (
        lambda llm: LLM.from_params(tiny_config(), State(embed=1)),
        "a state of Flax: begin with params.to_pure_dict",
    ),
    "from_params of nothing": (lambda llm: LLM.from_params(tiny_config(), {}), "it is empty: give a dict as in docs/"),
    "from_params with a file for a tokenizer": (
        lambda llm: LLM.from_params(tiny_config(), {"embed": 1}, "tokenizer.json"),
        "tokenizer='tokenizer.json' must be a quire Tokenizer: make one",
    ),
    "chat of one message": (
        lambda llm: llm.chat({"role": "user", "content": "a"}),
        "messages is one message: give messages",
    ),
    "generate of messages": (lambda llm: llm.generate([{"role": "user"}], progress=False), "messages are for LLM.chat"),
    "no model": (lambda llm: LLM(None), "MODEL None must be a folder, a GGUF file or a name on the hub"),
    "an empty model": (lambda llm: LLM(""), "MODEL '' must be a folder, a GGUF file or a name on the hub"),
    "a model that is a config": (lambda llm: LLM({}), "MODEL {} must be a folder, a GGUF file or a name on the hub"),
    "sampling_params": (lambda llm: llm.generate("a", sampling_params=SamplingParams()), "use params"),
    "use_tqdm": (lambda llm: llm.generate("a", use_tqdm=False), "use progress"),
    "cachesalt": (lambda llm: llm.generate("a", cachesalt="b"), "did you mean cache_salt?"),
    "sampling_params of stream": (lambda llm: llm.stream("a", sampling_params=1), "LLM.stream has no sampling_params"),
    "sampling_params of score": (lambda llm: llm.score([1, 2], sampling_params=1), "LLM.score has no sampling_params"),
    "sampling_params of AsyncLLM": (
        lambda llm: AsyncLLM.generate(None, "a", sampling_params=1),  # pyright: ignore
        "AsyncLLM.generate has no sampling_params; use params",
    ),
    "sampling_params of Rollouts": (
        lambda llm: Rollouts.submit(None, "a", sampling_params=1),  # pyright: ignore
        "Rollouts.submit has no sampling_params; use params",
    ),
    "sampling_params of chat": (lambda llm: llm.chat([{}], sampling_params=1), "LLM.chat has no sampling_params"),
    **{
        f"engine {name}": (lambda llm, name=name: LLM("nowhere", **{name: 2}), f"EngineConfig has no {name}; {hint}")
        for name, hint in {
            "tensor_parallel_size": "use mesh='model=N'",
            "gpu_memory_utilization": "use memory_budget",
            "enable_prefix_caching": "use prefix_cache",
            "block_size": "use page_size",
            "quantization": "use quantize",
            "trust_remote_code": "leave it out",
            "torch_dtype": "use dtype",
            "n_ctx": "use max_model_len",
            "swap_space": "use num_host_pages",
            "load_in_8bit": "use quantize='int8'",
        }.items()
    },
    **{
        f"sampling {name}": (
            lambda llm, name=name: SamplingParams(**{name: 2}),
            f"SamplingParams has no {name}; {hint}",
        )
        for name, hint in {
            "guided_json": "use structured=Structured(json_schema=...)",
            "guided_regex": "use structured=Structured(regex=...)",
            "max_new_tokens": "use max_tokens",
            "do_sample": "use temperature=0",
            "best_of": "all n sequences are returned",
            "num_beams": "tokens are sampled",
            "response_format": "use structured=Structured(...)",
            "stop_words": "use stop",
        }.items()
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_wrong_says_what_to_do(name, llm):
    call, says = CALLS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call(llm)
    assert says in str(caught.value)


def test_a_call_from_another_thread_names_what_threads_may_use(llm):
    raised = []

    def call():
        try:
            llm.generate([[1]], progress=False)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "use quire.AsyncLLM, or quire.Rollouts" in raised[0]


@pytest.mark.parametrize("dtype", [jnp.float32, np.float32, np.dtype("float32"), jnp.dtype("float32"), "float32"])
def test_a_dtype_may_be_jaxs_or_numpys(dtype):
    assert EngineConfig(dtype=dtype).dtype == "float32"
    assert EngineConfig(dtype=jnp.bfloat16).dtype == "bfloat16"
    with pytest.raises(ValueError, match="dtype='float16' must be one of bfloat16, float32"):
        EngineConfig(dtype=np.float16)  # pyright: ignore[reportArgumentType]


def test_a_pydantic_model_is_a_json_schema():
    assert Structured(json_schema=PydanticLike) == Structured(json_schema=PydanticLike.model_json_schema())


def test_a_folder_with_gguf_files_is_named_with_the_file_to_give(tmp_path, capsys):
    (tmp_path / "model.Q4_1.gguf").touch()
    assert main(["generate", str(tmp_path), "a"]) == 2
    error = capsys.readouterr().err
    assert "is a folder with GGUF files and no config.json" in error
    assert f"give the file, '{tmp_path}/model.Q4_1.gguf'" in error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset by peer"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a.json"), "a.json cannot be used: No such file"),
        (OSError("the group is gone"), "the group is gone"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_of_the_system_is_one_line_which_does_not_blame_the_output(monkeypatch, capsys, error, line):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert main(["models"]) == 1
    assert capsys.readouterr().err == f"quire: {line}\n"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--tensor-parallel-size", "use --mesh model=N"),
        ("--data-parallel-size", "use --mesh data=N"),
        ("--gpu-memory-utilization", "use --memory-budget"),
        ("--trust-remote-code", "leave it out: no code of a model is run"),
        ("--load-in-8bit", "use --quantize int8"),
        ("--swap-space", "use --num-host-pages"),
        ("--block-size", "use --page-size"),
        ("--download-dir", "set HF_HOME"),
        ("--page-sise", "did you mean --page-size?"),
    ],
)
def test_a_flag_of_another_engine_names_the_equivalent(flag, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "model", flag, "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {flag} 2; {says}\n")


def test_a_flag_that_samples_names_the_equivalent(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "model", "a", "--max-new-tokens", "3"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --max-new-tokens 3; use --max-tokens\n")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("args", [["--help"], ["--version"], ["serve", "--help-all"], ["--print-completion", "bash"]])
def test_a_full_disk_is_one_line(args, unbuffered):
    command, env = [sys.executable, "-m", "quire", *args], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.stderr == "quire: standard output cannot be used: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_a_usage(example):
    done = subprocess.run([sys.executable, str(example), "--help"], capture_output=True, text=True, timeout=300)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("a library of this example is not installed")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"python examples/{example.name}" in done.stdout


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        ("quire.integrations.ray", "build_app", "quire.integrations.ray needs Ray: pip install 'quire-llm[ray]'"),
        ("quire.integrations.tunix", "QuireRollout", "quire.integrations.tunix needs Tunix: pip install google-tunix"),
    ],
)
def test_an_integration_without_its_package_names_what_to_install(module, name, says):
    with pytest.raises(ModuleNotFoundError, match=re.escape(says)):
        getattr(importlib.import_module(module), name)
