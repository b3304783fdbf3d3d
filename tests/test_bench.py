"""The bench measures what it says: the same tokens on both sides, and lines that tools can read."""

import asyncio
import errno
import json
import socket
import ssl
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quire import SamplingParams
from quire.bench import http_client, measure
from quire.bench.bare_loop import BareLoop
from quire.bench.steps import calibrate
from quire.simulate.cost import PlanSize
from tests.tiny import tiny_config, tiny_llm

PEER = """
import json, sys
print("loading")
print(json.dumps({"ready": True, "seconds": 1.5}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    tokens = [[0] * asked["new_tokens"] for _ in asked["prompts"]]
    print(json.dumps({"seconds": 0.5, "tokens": tokens}), flush=True)
"""


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(tiny_config(eos_ids=()), max_num_seqs=4) as llm:
        yield llm


def test_bare_generates_what_the_engine_generates(llm):
    prompts = np.random.default_rng(0).integers(1, 97, size=(4, 9), dtype=np.int32)
    bare = BareLoop(llm.engine.runner, rows=4, prompt_len=9, new_tokens=11)
    expected = bare.generate(prompts)
    assert np.array_equal(bare.generate(prompts), expected), "its pages are overwritten, not left over"
    outputs = llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=11), progress=False)
    assert [out.outputs[0].token_ids for out in outputs] == expected.tolist()


def test_throughput_gives_both_speeds_and_their_ratio(llm):
    results = list(measure.throughput(llm, rows=[2, 4], prompt_len=8, new_tokens=4, repeats=2, against="bare"))
    assert [result["rows"] for result in results] == [2, 4]
    for result in results:
        assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["against_tokens_per_s"])
        assert result["ratio_min"] <= result["ratio_max"]


def test_a_peer_is_timed_by_its_own_clock(llm, tmp_path):
    (tmp_path / "peer.py").write_text(PEER)
    command = f"{sys.executable} {tmp_path / 'peer.py'}"
    (result,) = measure.throughput(llm, rows=[2], prompt_len=8, new_tokens=4, repeats=1, against=command)
    assert result["against_tokens_per_s"] == 2 * 4 / 0.5
    with measure.Peer(command) as peer:
        assert peer.seconds_to_ready == 1.5


def test_a_peer_that_dies_is_an_error(llm):
    with pytest.raises(ValueError, match="ended with exit code 3"):
        list(measure.prefill(llm, rows=[2], prompt_len=8, repeats=1, against=f"{sys.executable} -c 'exit(3)'"))


def test_serve_plays_the_trace(llm, tmp_path):
    rows = "".join(f"{at},{prompt},{new}\n" for at, prompt, new in [(0, 100, 40), (1, 50, 10), (4, 4000, 20)])
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    (result,) = measure.serve(llm, trace=trace, requests=3, scale=0.1, rate=30.0)
    assert result["seconds"] >= 0.1, "three requests at thirty a second"
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(4 + 1 + 2)
    assert result["prompt_tokens_per_s"] * result["seconds"] == pytest.approx(10 + 5 + 254), (
        "cut to what the model holds"
    )
    with pytest.raises(ValueError, match="has 3"):
        list(measure.serve(llm, trace=trace, requests=4, scale=0.1, rate=30.0))


@pytest.mark.parametrize("kind", ["latency", "fork", "prefix", "prefill", "host"])
def test_the_other_kinds_measure_something(llm, kind):
    given = {"repeats": 1, "rows": [2], "prompt_len": 12, "new_tokens": 4}
    if kind == "latency":
        results = measure.latency(llm, contexts=[8, 16], new_tokens=4, repeats=1)
    elif kind == "prefix":
        results = measure.prefix(llm, prompt_len=12, repeats=1)
    elif kind == "prefill":
        results = measure.prefill(llm, rows=[2], prompt_len=12, repeats=1, against="bare")
    else:
        results = getattr(measure, kind)(llm, **given)
    for result in results:
        assert result["kind"] == kind
        assert all(value > 0 for value in result.values() if isinstance(value, float))


@pytest.mark.slow
@pytest.mark.nightly
def test_throughput_against_bare_prints_a_json_line_for_each_number_of_rows(smollm2_gguf: Path):
    command = [sys.executable, "-m", "quire", "bench", "throughput", str(smollm2_gguf), "--against", "bare"]
    command += ["--rows", "4,8", "--prompt-len", "8", "--new-tokens", "4", "--repeats", "1", "--json", "-"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["rows"] for line in lines] == [4, 8]
    for line in lines:
        assert line["ratio"] == pytest.approx(line["tokens_per_s"] / line["against_tokens_per_s"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), "Connection refused"),
        (OSError("Multiple exceptions: [Errno 111] ..., [Errno 111] ..."), "Multiple exceptions: "),
        (
            ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate"),
            "certificate verify failed",
        ),
        (TimeoutError(), "no response in 10 s"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_server_that_cannot_be_reached_is_told_with_the_reason(monkeypatch, error, reason):
    async def fail(*_, **__):
        raise error

    monkeypatch.setattr(asyncio, "open_connection", fail)
    with pytest.raises(http_client.UnreachableError, match=f"cannot be reached: {reason}"):
        asyncio.run(http_client.get("https://h.example/v1", "/models"))


@pytest.mark.parametrize(("path", "is_told"), [("", True), ("/v1", False)])
def test_a_url_without_v1_is_told_so(path, is_told):
    async def not_found(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 404 Not Found\r\n\r\nno such route")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(not_found, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await http_client.get(f"http://127.0.0.1:{port}{path}", "/models")

    with pytest.raises(ValueError, match="/models answers 404: no such route") as error:
        asyncio.run(ask())
    assert ("--url ends in /v1" in str(error.value)) is is_told


def test_steps_are_calibrated_and_sizes_that_do_not_fit_are_refused_at_once(llm):
    sizes = {"model": "tiny", "rows": (1, 2, 4), "new_tokens": 3, "repeats": 1}
    found = calibrate(llm, prompt_len=6, **sizes)
    assert found.knobs["max_model_len"] == llm.engine.max_model_len
    assert found.seconds(PlanSize(2, 2, 4, 40)) >= found.seconds(PlanSize(2, 2, 1, 40)) > 0  # a fit of noise may have 0
    with pytest.raises(ValueError, match=f"prompt_len=999 .* max_model_len={llm.engine.max_model_len}"):
        calibrate(llm, prompt_len=999, **sizes)
    assert not llm.engine.has_work


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "stream"])
def test_a_connection_that_the_server_resets_is_an_error_with_its_address(sent):
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        linger = struct.pack("ii", 1, 0)  # closing sends RST
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            with pytest.raises(http_client.UnreachableError, match=f"{url} broke the connection: Connection reset"):
                await http_client.complete(url, {"prompt": "x"})

    asyncio.run(ask())
