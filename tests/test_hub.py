"""Models by name, against a hub on loopback: every file from one commit, verified, resumed, found again offline.

What a hub or a file on it can do wrong (wrong size, wrong hash, wrong names, endless bodies) is refused, and a token
stays with the hub.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download

from quire import LLM, SamplingParams
from quire.checkpoint import hub_cache
from quire.checkpoint.hub import HubName, fetch_model, parse_name
from quire.checkpoint.hub_cache import Record, RepoCache
from quire.checkpoint.hub_download import download
from quire.cli import main
from tests.server.tiny_folder import write_tiny_folder
from tests.stand_in_hub import StandInHub, digest, stand_in_hub

OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"
WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "onnx/config.json": b"{}",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
FETCH = """
import sys
from quire.checkpoint.hub import fetch_model, parse_name
try:
    print(fetch_model(parse_name(*sys.argv[1:])))
except ValueError as error:
    sys.exit(f"ValueError: {error}")
"""
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def hub(home, monkeypatch):
    """A hub with two commits, and this process set up for it as HF_ENDPOINT and HF_HOME would have done."""
    with stand_in_hub() as hub:
        hub.files = {OLD: dict(FILES), NEW: FILES | {"config.json": b'{"model_type": "qwen2"}'}}
        hub.refs = {"main": NEW, "v1.0": OLD}
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between attempts
        yield hub


def fetch(_: StandInHub, home: Path, *model: str) -> Done:
    """Fetch a model in this process."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            path = fetch_model(parse_name(*model))
        except ValueError as error:
            return Done([], 1, "", f"{said.getvalue()}ValueError: {error}")
    return Done([], 0, f"{path}\n", said.getvalue())


def quire(_: StandInHub, home: Path, *args: str) -> Done:
    """Run a command in this process."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        code = main(args)
    return Done([], code, printed.getvalue(), said.getvalue())


def python(hub: StandInHub, home: Path, *args: str, **env: str) -> Done:
    """Run Python in a process of its own: the library reads the environment once."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env = clean | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | env
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, stdin=subprocess.DEVNULL)


def fetch_elsewhere(hub: StandInHub, home: Path, *model: str, **env: str) -> Done:
    """Fetch a model in a process of its own."""
    return python(hub, home, "-c", FETCH, *model, **env)


def fetched(done: Done) -> dict[str, bytes]:
    """The files of a fetched folder."""
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in sorted(Path(done.stdout.strip()).glob("*.*"))}


def blobs(home) -> list[str]:
    """What lies in the cache of org/name."""
    return sorted(path.name for path in home.glob("hub/models--org--name/blobs/*"))


# -- names and commits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/na.me-1@v1.0", HubName("org/na.me-1", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", HubName("org/name", file="Q4_K_M")),
        (f"org/name:sub/x.gguf@{OLD}", HubName("org/name", OLD, "sub/x.gguf")),
        (f"org/name@{OLD}:Q8_0", HubName("org/name", OLD, "Q8_0")),
        ("org/name:a@b:c", None),
        ("name", None),
        ("a/b/c", None),
        ("../name", None),
        ("org/..", None),
        ("org/a..b", None),
        ("org/na--me", None),
        ("https://example.org/model", None),
    ],
)
def test_the_parts_of_a_name(text, name):
    assert parse_name(text) == name


@pytest.mark.parametrize("revision", ["", "../../x", "/etc/passwd", "a..b", "a b", "-x", "x" * 300])
def test_a_revision_is_no_path(revision):
    with pytest.raises(ValueError, match="must be a commit"):
        parse_name("org/name", revision)


def test_a_revision_is_said_once():
    with pytest.raises(ValueError, match="names a revision already"):
        parse_name("org/name@v1.0", "main")


def test_a_name_alone_is_the_default_branch_and_says_how_to_pin_it(hub, home):
    done = fetch(hub, home, "org/name")
    assert fetched(done) == {name: hub.files[NEW][name] for name in WANTED}
    assert done.stdout.strip().endswith(NEW)
    assert f"is commit {NEW}; to pin it: org/name@{NEW}" in done.stderr
    assert "fetching 1 file of org/name, 1.0 MB" in done.stderr
    assert "(100%)" in done.stderr


@pytest.mark.parametrize("model", [["org/name@v1.0"], ["org/name", "v1.0"], [f"org/name@{OLD}"], ["org/name", OLD]])
def test_every_file_comes_from_one_commit_and_no_code_does(hub, home, model):
    assert fetched(fetch(hub, home, *model)) == {name: FILES[name] for name in WANTED}
    files = [path for path in hub.paths() if "/resolve/" in path]
    assert sorted(files) == [f"/org/name/resolve/{OLD}/{name}" for name in WANTED]


def test_what_the_hub_does_not_have_is_said(hub, home):
    assert "no commit, branch or tag 'v9'" in fetch(hub, home, "org/name@v9").stderr
    assert "no such model, or it is private" in fetch(hub, home, "org/other").stderr


def test_weights_that_the_index_does_not_name_are_left(hub, home):
    shards = {f"model-{i}.safetensors": bytes([i]) * 1000 for i in (1, 2)}
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    hub.files[NEW] = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        **shards,
        "consolidated.safetensors": b"",
    }
    assert sorted(fetched(fetch(hub, home, "org/name"))) == [
        "config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    hub.files[OLD] = {name: data for name, data in hub.files[NEW].items() if name != "model-2.safetensors"}
    assert "names 'model-2.safetensors', which is not there" in fetch(hub, home, "org/name@v1.0").stderr


# -- connections that end --------------------------------------------------------------------------------------------


def test_bytes_before_a_cut_are_not_asked_again(hub, home):
    hub.cut_after["model.safetensors"] = [5 << 16, 3 << 16]  # at the end of what requests, an older client, hands on
    assert fetched(fetch(hub, home, "org/name"))["model.safetensors"] == WEIGHTS
    ranges = [asked.range for asked in hub.asked if asked.host == "storage"]
    begins = [int(text.removeprefix("bytes=").removesuffix("-")) if text else 0 for text in ranges]
    assert begins == [0, 5 << 16, 8 << 16]


def test_another_process_goes_on_where_one_stopped(hub, home):
    hub.cut_after["model.safetensors"] = [6 << 16] + [0] * 20
    failed = fetch(hub, home, "org/name")
    assert "393,216 of 1,048,576 bytes came" in failed.stderr
    assert "they are kept" in failed.stderr
    hub.cut_after.clear()
    hub.asked.clear()
    done = fetch_elsewhere(hub, home, "org/name")
    assert fetched(done)["model.safetensors"] == WEIGHTS
    assert "of which 393.2 kB are here already" in done.stderr
    assert [asked.range for asked in hub.asked if asked.host == "storage"] == ["bytes=393216-"]


def test_a_server_that_knows_no_ranges_sends_it_all_again(hub, home):
    hub.cut_after["model.safetensors"] = [400_000]
    hub.ignores_ranges = True
    assert fetched(fetch(hub, home, "org/name"))["model.safetensors"] == WEIGHTS


# -- lies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("model.safetensors", WEIGHTS[:-1] + b"x", "model.safetensors has the hash"),
        ("config.json", FILES["config.json"].replace(b"llama", b"evil."), "config.json has the hash"),
        ("model.safetensors", WEIGHTS + b"more", "longer than the 1,048,576 bytes that the commit says"),
        ("model.safetensors", WEIGHTS[:-100], "ends before the 1,048,576 bytes that the commit says"),
    ],
    ids=["hash", "hash of a small file", "longer", "shorter"],
)
def test_a_file_that_lies_is_refused_and_deleted(hub, home, name, content, says):
    hub.served[name] = content
    done = fetch(hub, home, "org/name@v1.0")
    assert done.returncode != 0
    assert says in done.stderr
    assert "deleted" in done.stderr
    assert not [blob for blob in blobs(home) if digest(name, FILES[name]) in blob]
    hub.served.clear()
    assert fetched(fetch(hub, home, "org/name@v1.0"))[name] == FILES[name]


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", "x\n.json", "./x.json", "a//x.json"]
)
def test_a_file_name_that_leads_elsewhere_is_refused(hub, home, name):
    hub.files[NEW] = FILES | {name: b"{}"}
    done = fetch(hub, home, "org/name")
    assert "is refused: it must be a path below the model's folder" in done.stderr
    assert not list(home.parent.rglob("x*.json"))


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ({"oid": "../../../x"}, "must be 40 or 64 hex digits"),
        ({"size": -1}, "must be a whole number"),
        ({"size": "5"}, "must be a whole number"),
    ],
    ids=str,
)
def test_a_listing_that_makes_no_sense_is_refused(hub, home, listed, says):
    hub.listed["config.json"] = listed
    assert says in fetch(hub, home, "org/name").stderr


def test_a_commit_that_is_none_is_refused(hub, home):
    hub.refs["main"] = "../../x"
    hub.files["../../x"] = FILES
    assert "which is none" in fetch(hub, home, "org/name").stderr


def test_what_does_not_fit_the_disk_is_not_begun(hub, home):
    hub.listed["model.safetensors"] = {"lfs": {"oid": digest("x.bin", b""), "size": 1 << 60, "pointerSize": 1}}
    done = fetch(hub, home, "org/name")
    assert "1152921504.6 GB are to be fetched" in done.stderr
    assert "set HF_HOME" in done.stderr
    assert not hub.paths("storage")


def test_a_token_stays_with_the_hub(hub, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.cut_after["model.safetensors"] = [1000]
    fetched(fetch(hub, home, "org/name"))
    assert {asked.token for asked in hub.asked if asked.host == "hub"} == {"Bearer hf_secret"}
    assert hub.paths("storage")
    assert {asked.token for asked in hub.asked if asked.host == "storage"} == {None}


@pytest.mark.parametrize("status", [403, 500])
def test_an_error_does_not_tell_the_signature_of_an_address(hub, home, status):
    """Whoever reads it in a log could fetch the file of a private model."""
    hub.storage_status = status
    done = fetch(hub, home, "org/name")
    assert f"{status}" in done.stderr
    assert "model.safetensors" in done.stderr
    assert "secret" not in done.stderr


# -- the cache -------------------------------------------------------------------------------------------------------


def test_a_second_start_of_a_pinned_model_asks_nobody_and_hashes_nothing(hub, home, monkeypatch):
    fetched(fetch(hub, home, f"org/name@{OLD}"))
    hub.asked.clear()
    monkeypatch.setattr(hub_cache, "hashlib", None)
    done = fetch(hub, home, f"org/name@{OLD}")
    assert fetched(done) == {name: FILES[name] for name in WANTED}
    assert not hub.asked
    assert not done.stderr


def test_a_file_that_changed_on_disk_is_deleted_and_fetched_again(hub, home):
    fetched(fetch(hub, home, "org/name"))
    blob = home / "hub/models--org--name/blobs" / digest("model.safetensors", WEIGHTS)
    blob.write_bytes(WEIGHTS[:-1] + b"x")
    os.utime(blob, ns=(0, 0))  # two writes may share a tick of the clock of files
    hub.asked.clear()
    done = fetch(hub, home, "org/name")
    assert "model.safetensors has the hash" in done.stderr
    assert fetched(done)["model.safetensors"] == WEIGHTS
    assert len(hub.paths("storage")) == 1


def test_a_link_out_of_the_cache_is_replaced_and_what_it_leads_to_stays(hub, home, tmp_path):
    fetched(fetch(hub, home, "org/name"))
    (tmp_path / "mine").write_bytes(b"mine")
    link = home / f"hub/models--org--name/snapshots/{NEW}/model.safetensors"
    link.unlink()
    link.symlink_to(tmp_path / "mine")
    assert fetched(fetch(hub, home, "org/name"))["model.safetensors"] == WEIGHTS
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_file_that_came_meanwhile_is_left_alone(hub, home):
    """Another process may have fetched it, and be about to open it: its link must not go away even for a moment."""
    fetched(fetch(hub, home, "org/name"))
    cache = RepoCache("org/name", home / "hub")
    (file,) = (file for file in cache.files_on_disk(NEW) if file.path == "model.safetensors")
    link = cache.snapshot(NEW) / file.path
    before = link.lstat()
    hub.asked.clear()
    download([file], NEW, cache, Record(cache, NEW), None)
    assert link.lstat().st_mtime_ns == before.st_mtime_ns
    assert not hub.asked


@pytest.mark.parametrize("known", ["", "[]", '{"files": []}', '{"files": {"a": 1}}', '{"files": {}, "verified": 3}'])
def test_a_broken_record_of_a_commit_is_as_if_there_were_none(hub, home, known):
    fetched(fetch(hub, home, f"org/name@{OLD}"))
    (record,) = home.glob("hub/models--org--name/.quire/*")
    record.write_text(known)
    assert fetched(fetch(hub, home, f"org/name@{OLD}"))["model.safetensors"] == WEIGHTS


def test_contents_that_another_commit_has_too_are_not_fetched_again(hub, home):
    fetched(fetch(hub, home, "org/name@v1.0"))
    hub.asked.clear()
    fetched(fetch(hub, home, "org/name"))
    assert not hub.paths("storage")
    assert [path for path in hub.paths() if "/resolve/" in path] == [f"/org/name/resolve/{NEW}/config.json"]


def test_what_another_tool_fetched_is_found_and_it_finds_ours(hub, home):
    theirs = "from huggingface_hub import snapshot_download; print(snapshot_download('org/name', {}))"
    done = python(hub, home, "-c", theirs.format("revision='v1.0'"))
    assert done.returncode == 0, done.stderr
    hub.asked.clear()
    assert fetch(hub, home, "org/name@v1.0").stdout == done.stdout
    assert not [path for path in hub.paths() if "/resolve/" in path]
    ours = fetch(hub, home, "org/name")
    done = python(hub, home, "-c", theirs.format("local_files_only=True"))
    assert done.stdout == ours.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["told", "unreachable", "broken"])
def test_without_a_hub_the_last_known_commit_is_used(hub, home, how):
    fetched(fetch(hub, home, "org/name"))
    hub.refs["main"] = OLD
    env = {"told": {"HF_HUB_OFFLINE": "1"}, "unreachable": {"HF_ENDPOINT": "http://127.0.0.1:9"}, "broken": {}}[how]
    hub.status = 503 if how == "broken" else None
    done = fetch_elsewhere(hub, home, "org/name", **env)
    assert fetched(done)["config.json"] == hub.files[NEW]["config.json"]
    assert "the hub cannot be reached" in done.stderr
    assert f"was commit {NEW} when last asked" in done.stderr
    missing = fetch_elsewhere(hub, home, "org/name@v1.0", **env)
    assert "org/name@v1.0 is not on disk, and the hub cannot be reached" in missing.stderr


@pytest.mark.slow
def test_offline_files_of_another_tool_are_checked_by_the_names_of_their_blobs(hub, home):
    theirs = "from huggingface_hub import snapshot_download; snapshot_download('org/name')"
    assert python(hub, home, "-c", theirs).returncode == 0
    assert fetched(fetch_elsewhere(hub, home, "org/name", HF_HUB_OFFLINE="1"))["model.safetensors"] == WEIGHTS
    (home / "hub/models--org--name/blobs" / digest("model.safetensors", WEIGHTS)).write_bytes(b"rot")
    done = fetch_elsewhere(hub, home, "org/name", HF_HUB_OFFLINE="1")
    assert "model.safetensors has the hash" in done.stderr
    assert "not on disk: model.safetensors; and the hub cannot be reached" in done.stderr


# -- GGUF ------------------------------------------------------------------------------------------------------------

GGUFS = {f"model-{quant}.gguf": quant.encode() for quant in ("Q4_K_M", "Q4_K_S", "IQ4_XS", "Q8_0", "UD-Q4_K_XL", "f16")}


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf"),
        ("q8_0", "model-Q8_0.gguf"),
        ("F16", "model-f16.gguf"),
        ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("model-IQ4_XS.gguf", "model-IQ4_XS.gguf"),
        ("sub/other.gguf", "sub/other.gguf"),
        ("other.gguf", "sub/other.gguf"),
    ],
)
def test_a_gguf_file_by_name_or_quantisation(hub, home, asked, path):
    hub.files[NEW] = FILES | GGUFS | {"sub/other.gguf": b"other", "mmproj-f16.gguf": b"an eye"}
    done = fetch(hub, home, f"org/name:{asked}")
    assert done.stdout.strip().endswith(f"{NEW}/{path}")
    assert Path(done.stdout.strip()).read_bytes() == hub.files[NEW][path]
    assert f"to pin it: org/name:{asked}@{NEW}" in done.stderr
    assert [name for name in hub.paths() if "/resolve/" in name] == [f"/org/name/resolve/{NEW}/{path}"]


@pytest.mark.parametrize(
    ("files", "model", "says"),
    [
        (GGUFS, "org/name", "has GGUF files only; choose one, as in org/name:model-Q4_K_M.gguf"),
        (GGUFS, "org/name:Q4_K", "has no GGUF files for 'Q4_K'"),
        (GGUFS, "org/name:Q4_XS", "has no GGUF files for 'Q4_XS'"),
        (GGUFS | {"b-Q8_0.gguf": b""}, "org/name:Q8_0", "has 2 GGUF files for 'Q8_0'"),
        ({"x-Q8_0-00001-of-00002.gguf": b"", "x-Q8_0-00002-of-00002.gguf": b""}, "org/name:Q8_0", "split GGUF files"),
        ({"x-00001-of-00001.gguf": b""}, "org/name", "split GGUF files are not read"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "org/name", "other formats are never loaded"),
    ],
    ids=str,
)
def test_a_gguf_file_that_is_not_one_is_refused_with_those_there_are(hub, home, files, model, says):
    hub.files[NEW] = files
    done = fetch(hub, home, model)
    assert done.returncode != 0
    assert says in done.stderr
    if "choose one" in done.stderr:
        assert all(f"  {name}  " in done.stderr for name in files)
    assert not hub.paths("storage")


def test_one_gguf_file_needs_no_choice(hub, home):
    hub.files[NEW] = {"README.md": b"", "only.gguf": b"weights"}
    assert fetch(hub, home, "org/name").stdout.strip().endswith("/only.gguf")


# -- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(hub, tmp_path):
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "top_p": "high"}))
    hub.files = {NEW: {path.name: path.read_bytes() for path in folder.iterdir()}}
    hub.refs = {"main": NEW}
    return hub


def test_a_model_by_name_generates_pulls_and_is_listed(tiny, home, capsys):
    with LLM("org/name", dtype="float32", num_pages=64, max_num_seqs=2, max_num_batched_tokens=32) as llm:
        params = llm.default_params
        assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0)
        (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), progress=False)
        assert len(output.outputs[0].token_ids) == 5
    said = capsys.readouterr().err
    assert "this model's sampling, unless a request says otherwise: temperature 0.6, top_k 20" in said
    assert "left out of the model's sampling: top_p='high' must be a number" in said

    pulled = quire(tiny, home, "pull", "org/name")
    assert pulled.stdout.strip() == str(home / f"hub/models--org--name/snapshots/{NEW}"), pulled.stderr
    (model,) = map(json.loads, quire(tiny, home, "models", "--json").stdout.splitlines())
    size = sum(len(data) for data in tiny.files[NEW].values())
    assert model == {
        "model": "org/name", "commit": NEW, "revisions": ["main"], "bytes": size, "runs": True, "why_not": None,
        "path": pulled.stdout.strip(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq' are not supported"),
    ],
    ids=str,
)
def test_weights_of_a_model_that_does_not_run_are_not_fetched(tiny, home, changed, says):
    config = json.loads(tiny.files[NEW]["config.json"]) | changed
    tiny.files[NEW]["config.json"] = json.dumps(config).encode()
    done = quire(tiny, home, "pull", "org/name")
    assert done.returncode == 2
    assert says in done.stderr
    assert not tiny.paths("storage")


def test_models_says_why_one_does_not_run(tiny, home, smollm2_gguf):
    tiny.files[OLD] = {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b"x"}
    assert quire(tiny, home, "models").stdout.startswith("no models in ")
    for revision in (OLD, NEW):
        fetched(fetch(tiny, home, "org/name", revision))
    snapshot = home / f"hub/models--org--gguf/snapshots/{NEW}"
    snapshot.mkdir(parents=True)
    (snapshot / "real.gguf").symlink_to(smollm2_gguf)
    (snapshot / "broken.gguf").write_bytes(b"GGUF")
    (home / f"hub/models--org--name/snapshots/{NEW}/model.safetensors").unlink()
    done = quire(tiny, home, "models")
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    assert rows[0] == ["MODEL", "COMMIT", "SIZE", "RUNS"]
    assert [row[:2] for row in rows[1:]] == [
        ["org/gguf:broken.gguf", NEW[:7]],
        ["org/gguf:real.gguf", NEW[:7]],
        ["org/name", OLD[:7]],
        ["org/name", NEW[:7]],
    ]
    assert rows[1][4].startswith("no: broken.gguf is not a GGUF file")
    assert rows[2][2:] == ["98.4", "MB", "yes"]
    assert rows[3][4].startswith("no: architecture 'mamba' is not supported")
    assert rows[4][4] == "no: model.safetensors is not on disk; quire pull fetches it"
