"""A recording holds what decides and nothing that was said. Replayed, every decision is the same, or the first other
one is named. No file, torn or hostile, does more than raise."""

import dataclasses
import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire import EngineConfig, SamplingParams
from quire.cli import main
from quire.core import scheduler as scheduler_module
from quire.core.request import Request
from quire.core.sequence import SequenceState
from quire.recording import recording_file
from quire.recording.decisions import WatchedScheduler
from quire.recording.recording_file import RecordingError, RecordingWriter, read_records
from quire.recording.replay import replay
from quire.testing import fake_engine
from tests.histories import WEIGHTS, History

RULES = list(WEIGHTS)


def busy_engine(path: Path, requests: int, seed: int = 0, **knobs) -> None:
    """Requests that share beginnings, in a pool too small for them: preemptions, forks, aborts, new weights."""
    rng = random.Random(seed)
    knobs = {
        "num_pages": 48,
        "num_host_pages": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_rounds": 4,
    } | knobs
    engine = fake_engine(vocab_size=50, record=str(path), **knobs)
    roots = [[rng.randrange(1, 50) for _ in range(40)] for _ in range(20)]
    sequences, added = [], 0
    while added < requests or engine.has_work:
        while added < requests and len(engine.scheduler.waiting) < 4:
            prompt = [*rng.choice(roots)[: rng.randint(1, 40)], rng.randrange(1, 50)]
            params = SamplingParams(
                temperature=1, seed=added, max_tokens=rng.randint(1, 20), n=rng.choice((1, 1, 1, 2))
            )
            request = Request(
                id=f"r{added}", prompt_token_ids=tuple(prompt), params=params, priority=rng.choice((0, 0, 0, 1))
            )
            sequences += engine.add(request)
            added += 1
        engine.step()
        sequences = [s for s in sequences if s.state is not SequenceState.FINISHED]
        forkable = [s for s in sequences if s.num_output and s.state is SequenceState.RUNNING]
        if forkable and rng.random() < 0.02:
            sequences.append(engine.fork(rng.choice(forkable)))
        if sequences and rng.random() < 0.01:
            engine.abort(rng.choice(sequences))
        if rng.random() < 0.001:
            engine.set_weights(added, running=rng.choice(("keep", "recompute")))
    engine.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.quire"
    busy_engine(path, 300)
    return path


@pytest.mark.parametrize("seed", range(6))
def test_any_history_is_decided_again(seed, tmp_path):
    """Forks, aborts in flight, failing steps, weights, tenants, resets, grammars, kept ends, windows, scores."""
    path = tmp_path / "history"
    windows = (None, 4) if seed % 3 == 0 else (None,)
    knobs = {"max_rounds": 1 + seed % 4, "windows": windows, "prefix_cache": seed != 5, "drafts": 8 * (seed % 2)}
    history = History(seed, record=str(path), **knobs)
    history.evict = history.engine.clear_prefix_cache  # all of it: a part is nothing that an engine can be asked for
    if history.has_tenants:
        history.engine.set_tenant_weights({"tenant": 3})
    for _ in range(300):
        history.play(history.random.choices(RULES, WEIGHTS.values())[0])
    history.engine.sleep()
    history.engine.wake(7)
    for _ in range(10):
        history.engine.step()
    history.engine.close()
    result = replay(path)
    assert result.difference is None
    assert result.requests
    assert result.preemptions
    assert bool(history.engine.stats().accepted_drafts) == seed % 2


@pytest.mark.slow
def test_ten_thousand_requests_are_decided_again(tmp_path):
    path = tmp_path / "run"
    busy_engine(path, 10_000)
    result = replay(path)
    print(result, f"{path.stat().st_size:,} bytes")
    assert result.difference is None
    assert result.requests == 10_000
    assert min(result.preemptions, result.forks) > 100


class SmallerFromStep100(WatchedScheduler):
    """Another policy: from the 100th step on, half as many tokens in each."""

    num_plans = 0

    def schedule(self):
        self.num_plans += 1
        if self.num_plans == 100:
            self.max_num_batched_tokens //= 2
        return super().schedule()


def test_another_policy_is_found_where_it_first_decides_otherwise(recording, monkeypatch):
    difference = replay(recording, SmallerFromStep100).difference
    assert difference is not None
    tokens = [plan[2] and sum(plan[2][3::4]) for plan in _plans(recording)]
    assert difference.step == next(i for i, count in enumerate(tokens, 1) if i >= 100 and count > 16)
    assert any(line.startswith("row ") for line in difference.lines)

    monkeypatch.setattr(scheduler_module, "WATCHED_ROUNDS", 3)
    difference = replay(recording).difference
    assert difference is not None
    first = next(i for i, plan in enumerate(_plans(recording), 1) if 4 in _rounds(plan))
    assert difference.step == first
    assert difference.lines[0].startswith("rounds: ")


def _plans(path: Path) -> list[list]:
    return [record for record in read_records(path)[1] if record[0] == "plan"]


def _rounds(plan: list) -> list[int]:
    return [plan[3]] if isinstance(plan[3], int) else plan[3]


def test_a_changed_number_is_told(recording, tmp_path):
    """Each part of a decision counts: the step is named, and what it is."""
    header, records = read_records(recording)
    records = list(records)
    at = [i for i, record in enumerate(records) if record[0] == "plan"][40]
    for field, name in (
        (2, "row"),
        (4, "samples"),
        (7, "free pages"),
        (8, "recomputes"),
        (9, "swaps"),
        (12, "page sum"),
    ):
        changed = json.loads(json.dumps(records))
        changed[at][field] = [*changed[at][field], 1, 2, 3, 4] if isinstance(changed[at][field], list) else 999_999
        path = tmp_path / f"changed{field}"
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in (header, *changed)).encode()))
        difference = replay(path).difference
        assert difference is not None
        assert difference.step == 41
        assert any(line.startswith(name) for line in difference.lines)


def test_no_word_and_no_token_is_written(tmp_path):
    path = tmp_path / "run"
    engine = fake_engine(vocab_size=60_000, record=str(path), num_pages=64)
    prompt = (41_234, 41_235, 41_236, 41_237, 51_111)
    params = SamplingParams(max_tokens=4, stop_token_ids=[42_424], logit_bias={43_434: 1}, seed=515_151)
    engine.add(Request(id="secret-name", prompt_token_ids=prompt, params=params, cache_salt="secret-tenant"))
    while engine.has_work:
        engine.step()
    engine.set_weights(3, version="secret-version")
    engine.close()
    text = gzip.decompress(path.read_bytes()).decode()
    assert "secret" not in text
    for number in (*prompt, 42_424, 43_434, 515_151):
        assert str(number) not in text
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_request_is_found_by_the_id_of_its_client(tmp_path, capsys):
    """All of its parts are; the file has no id in the clear, and a file without ids is replayed all the same."""
    path = tmp_path / "run"
    engine = fake_engine(record=str(path), num_pages=64)
    for request_id in ("order-1234-0-0123abcd", "order-1234-1-4567cdef", "another"):
        params = SamplingParams(max_tokens=4)
        engine.add(Request(id=request_id, prompt_token_ids=(1, 2, 3), params=params))
    while engine.has_work:
        engine.step()
    engine.close()
    assert "order" not in gzip.decompress(path.read_bytes()).decode()
    arrivals = [found.arrival for found in replay(path, request_id="order-1234").found]
    assert len(arrivals) == 2
    assert main(["replay", str(path), "--request", "another"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        rf"^request another: arrival {arrivals[1] + 1}, added after 0\.\d+ s, 3 prompt", shown, re.MULTILINE
    )
    assert main(["replay", str(path), "--request", "order"]) == 0
    assert "request order: not among the 3 requests that were replayed" in capsys.readouterr().out

    header, records = read_records(path)
    lines = [header, *records]
    for record in (line for line in lines[1:] if line[0] == "add"):
        assert len(record[5].pop("request")) == 16
    older = tmp_path / "older"
    older.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    result = replay(older, request_id="another")
    assert (result.difference, result.requests, result.found) == (None, 3, [])


def test_the_command_says_whether_it_is_the_same(recording, monkeypatch, capsys):
    assert main(["replay", str(recording)]) == 0
    assert "every decision is the same" in capsys.readouterr().out
    monkeypatch.setattr(scheduler_module, "WATCHED_ROUNDS", 3)
    assert main(["replay", str(recording)]) == 1
    assert "differs:\n  rounds: " in capsys.readouterr().out
    assert main(["replay", str(recording) + "-not"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_replaying_needs_no_jax(recording):
    code = f"""
import sys; sys.modules["jax"] = None
from pathlib import Path
from quire.recording.replay import replay
assert replay(Path({str(recording)!r})).difference is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torn_file_is_told_and_read_as_far_as_it_goes(recording, tmp_path):
    data = recording.read_bytes()
    path = tmp_path / "torn"
    for size in (0, 5, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(RecordingError, match="torn"):
            replay(path)
    path.write_bytes(data + b"x")
    with pytest.raises(RecordingError, match="behind its end"):
        replay(path)


def test_no_bytes_do_more_than_raise(recording, tmp_path):
    data, rng, path = bytearray(recording.read_bytes()), random.Random(0), tmp_path / "noise"
    for _ in range(100):
        noisy = data[:]
        for _ in range(rng.choice((1, 3, 5))):
            noisy[rng.randrange(10, len(noisy))] ^= 1 << rng.randrange(8)  # before that is gzip's own header
        path.write_bytes(noisy)
        with pytest.raises(RecordingError):
            replay(path)


def test_no_record_does_more_than_raise(recording, tmp_path):
    """A whole file of records that lie: a wrong kind, number or shape is told, or a difference."""
    header, records = read_records(recording)
    records = list(records)
    rng, path = random.Random(0), tmp_path / "lies"
    lies = [None, -1, 2**63, 2**200, 1e308, "", "x", [], [[]], {}, {"n": 1024}, True, [1, 2, 3, 4] * 10]
    caught = 0
    for _ in range(300):
        changed = [header, *json.loads(json.dumps(records[:120]))]
        record = rng.choice(changed)
        if isinstance(record, dict):
            name = rng.choice(["format", "version", "scheduler", "costs", "scheduler"])
            inside = name == "scheduler" and rng.random() < 0.7
            record = dict(header, scheduler=dict(header["scheduler"]))
            target = record["scheduler"] if inside else record
            target[rng.choice(list(target))] = rng.choice(lies)
            changed[0] = record
        else:
            record[rng.randrange(len(record))] = rng.choice(lies)
        path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in changed).encode(), 1))
        try:
            caught += replay(path).difference is not None
        except RecordingError:
            caught += 1
    assert caught > 200


def test_a_bomb_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_file, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(b"[" * (1 << 26)))
    with pytest.raises(RecordingError, match="line of more than"):
        replay(path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"format": "quire recording", "version": 2}, "version"),
        ({"format": "quire recording", "version": 1}, "header"),
        ({"format": "tar"}, "tar"),
        ([1], "no header"),
    ],
)
def test_another_format_is_refused(header, match, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(gzip.compress(json.dumps(header).encode() + b"\n"))
    with pytest.raises(RecordingError, match=match if match != "version" else "quire recording"):
        replay(path)


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "there"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"record=.*name another file"):
        fake_engine(record=str(path))
    assert path.read_text() == "mine"
    with pytest.raises(ValueError, match=r"record=.*cannot be written"):
        fake_engine(record=str(tmp_path / "no" / "folder"))


def test_several_engines_do_not_share_a_file():
    with pytest.raises(ValueError, match=r"record='file' is the file of one engine and mesh='data=2' has 2"):
        EngineConfig(record="file", mesh="data=2")


def test_a_full_disk_ends_the_recording_and_not_the_engine(tmp_path, monkeypatch, caplog):
    engine = fake_engine(vocab_size=100, record=str(tmp_path / "run"))
    engine.add(Request(id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=3, ignore_eos=True)))
    engine.step()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    engine.scheduler._writer.flush()
    for i in range(50):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add(Request(id=f"b{i}", prompt_token_ids=tuple(range(1 + i, 31 + i)), params=params))
        while engine.has_work:
            engine.step()
    assert engine.scheduler._names == [], "nobody will ever write them"
    engine.close()
    assert "the recording ends here: No space left on device" in caplog.text


def test_a_recording_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(recording_file, "MAX_FILE_BYTES", 1000)
    writer = RecordingWriter(str(tmp_path / "run"))
    rng = random.Random(0)
    for _ in range(100):
        writer.write([rng.random() for _ in range(100)])
        writer.flush()
    writer.close()
    assert (tmp_path / "run").stat().st_size < 3000


def test_what_was_interrupted_in_a_commit_is_not_trusted(tmp_path, monkeypatch):
    path = tmp_path / "run"
    engine = fake_engine(record=str(path))
    engine.add(Request(id="a", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_module, "accept_pooled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_work:
        engine.step()
    engine.close()
    with pytest.raises(RecordingError, match="interrupted in the middle of its commit"):
        replay(path)


def test_nothing_records_unless_asked():
    engine = fake_engine()
    assert type(engine.scheduler) is scheduler_module.Scheduler
    assert dataclasses.replace(engine.config).record is None
