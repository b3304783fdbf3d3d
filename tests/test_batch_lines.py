"""A batch loses no line and answers none twice, wherever it was stopped; a wrong line has an error for an answer."""

import asyncio
import contextlib
import json
import random

import pytest

from quire import AsyncLLM
from quire.async_llm import UnavailableError
from quire.server.batches import answer as answer_module
from quire.server.batches import lines as lines_module
from quire.server.batches import run as run_module
from quire.server.batches.answer_file import AnswerFile
from quire.server.batches.lines import count_lines, read_lines
from quire.server.batches.run import CostLimitError
from tests.batch_files import answer_file, completion, read_answers, write_jsonl
from tests.fake_llm import LONG_S, Gate, fake_llm


def run(function, **knobs):
    """What a coroutine of an engine without a model comes to."""

    async def opened():
        async with AsyncLLM.from_factory(lambda: fake_llm(**knobs)) as engine:
            return await asyncio.wait_for(function(engine), LONG_S)

    return asyncio.run(opened())


def mixed_lines(count: int) -> list:
    """Lines of many lengths, some of them wrong and one empty."""
    rng = random.Random(0)
    lines: list = [
        completion(f"line-{i}", prompt=[rng.randint(1, 10) for _ in range(rng.randint(1, 9))],
                   max_tokens=rng.randint(1, 9), temperature=rng.choice([0, 1]))
        for i in range(count)
    ]  # fmt: skip
    lines[3] = "this is no JSON"
    lines[5] = ""
    lines[7] = completion("too long", max_tokens=100_000)
    lines[8] = completion("unknown model", model="gpt-4")
    return lines


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("batch") / "input.jsonl", mixed_lines(16))


@pytest.fixture(scope="module")
def whole(given):
    """The output of one run."""
    output = given.with_name("whole.jsonl")
    run(lambda engine: answer_file(engine, given, output))
    return output.read_bytes()


def test_answers_are_in_the_order_of_the_lines_and_every_line_has_one(given, whole):
    answers = read_answers(whole)
    sent = [json.loads(line) if line.startswith("{") else {} for line in given.read_text().splitlines() if line]
    assert [answer["custom_id"] for answer in answers] == [line.get("custom_id") for line in sent]
    assert len({answer["id"] for answer in answers}) == len(answers) == 15
    for answer in answers:
        if answer["custom_id"] in (None, "too long", "unknown model"):
            assert answer["response"]["status_code"] >= 400
            assert answer["error"]["message"] == answer["response"]["body"]["error"]["message"]
        else:
            assert (answer["response"]["status_code"], answer["error"]) == (200, None)
            assert len(answer["response"]["body"]["choices"]) == 1


def test_cut_at_any_byte_a_batch_that_goes_on_has_the_same_answers(given, whole):
    """Each cut is what a crash may leave: whole answers and perhaps a part of one."""
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    rng = random.Random(1)
    near_ends = {end + by for end in ends for by in (-2, -1, 0, 1)}
    cuts = {0, 1, len(whole), *rng.sample(range(len(whole)), 20), *near_ends}
    output = given.with_name("cut.jsonl")

    async def every_cut(engine):
        for cut in sorted(cut for cut in cuts if 0 <= cut <= len(whole)):
            output.write_bytes(whole[:cut])
            written = await answer_file(engine, given, output, in_flight=rng.randint(1, 9))
            assert read_answers(output) == read_answers(whole), cut
            assert output.read_bytes().startswith(whole[: max([0, *(end for end in ends if end <= cut)])])
            assert len(written) == sum(end > cut for end in ends), "nothing is answered twice"

    run(every_cut)


def test_every_byte_where_an_output_can_be_cut_leaves_a_beginning_of_it(given, whole, tmp_path, monkeypatch):
    """The same for all bytes, without running what is left."""
    monkeypatch.setattr(AnswerFile, "sync", lambda self: None)
    output = tmp_path / "output.jsonl"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [*range(ends[3] + 2), *ends]:
        output.write_bytes(whole[:cut])
        file = AnswerFile(output)
        with given.open("rb") as source:
            lines = read_lines(source, "")
            file.skip_answered(lines)
            left = sum(1 for _ in lines)
        file.close()
        kept = output.read_bytes()
        assert whole.startswith(kept)
        assert kept == b"" or kept.endswith(b"\n")
        assert kept.count(b"\n") == whole[:cut].count(b"\n") == file.num_answered == 15 - left


def test_what_a_file_system_left_of_a_line_after_power_was_lost_is_cut_off(given, whole):
    output = given.with_name("zeros.jsonl")
    end = whole.index(b"\n") + 1
    for rest in (b"\0" * 50, b"\0" * 50 + b"\n" + whole[end : end + 20], whole[end : end + 60] + b'\xff"}\n'):
        output.write_bytes(whole[:end] + rest)
        run(lambda engine: answer_file(engine, given, output))
        assert read_answers(output) == read_answers(whole)


def skip_answered(given, output, **how) -> int:
    """How many lines of an output are kept."""
    file = AnswerFile(output)
    try:
        with given.open("rb") as source:
            file.skip_answered(read_lines(source, ""), **how)
    finally:
        file.close()
    return file.num_answered


@pytest.mark.parametrize("num_answers", [0, 2])
@pytest.mark.parametrize(
    "rest",
    [
        b"id,value\n1,2\n",
        b'{\n "a": 1\n}\n',
        b"[\n]",
        b'{"custom_id": "x", "method": "POST"}\n',
        b'{"id": "x", "error": null}',
        b"\n\ntext",
        b"\0\0\0\x18ftyp",
        b"\0\n\0\x18\n",
        b"PAR1\x15",
        b'{"id":"batch_req_\xff\ntext\n',
    ],
)
def test_what_is_no_part_of_an_answer_is_refused_and_stays_as_it_is(given, whole, tmp_path, num_answers, rest):
    output = tmp_path / "output"
    content = b"".join(whole.splitlines(keepends=True)[:num_answers]) + rest
    output.write_bytes(content)
    with pytest.raises(ValueError, match=rf"line {num_answers + 1} of .* is not the answer to its line"):
        skip_answered(given, output)
    assert output.read_bytes() == content


def test_good_answers_behind_a_damaged_one_are_cut_off_only_if_nobody_else_can_have_written_it(given, whole, tmp_path):
    lines, output = whole.splitlines(keepends=True), tmp_path / "output.jsonl"
    for damaged in (b"\0" * 10 + b"\n", lines[3][:70] + b"\0\0\n"):
        content = b"".join([*lines[:3], damaged, *lines[4:]])
        output.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"line 4 of .* is damaged, and answers follow it: remove the lines from 4"
        ):
            skip_answered(given, output)
        assert output.read_bytes() == content
        assert skip_answered(given, output, is_own=True) == 3
        assert output.read_bytes() == b"".join(lines[:3])


def test_an_output_of_something_else_is_refused_and_stays_as_it_is(given, whole, tmp_path):
    output = tmp_path / "output.jsonl"
    output.write_bytes(whole)
    shorter = write_jsonl(tmp_path / "shorter.jsonl", mixed_lines(16)[:12])
    changed = write_jsonl(tmp_path / "changed.jsonl", [completion("new"), *mixed_lines(16)[1:]])
    for other, batch in ((shorter, ""), (changed, ""), (given, "other flags")):
        with pytest.raises(ValueError, match=r"line \d+ of .* is not the answer to its line"):
            run(lambda engine, other=other, batch=batch: answer_file(engine, other, output, batch=batch))
        assert output.read_bytes() == whole


def test_lines_that_are_added_later_are_answered_later(given, whole, tmp_path):
    longer, output = write_jsonl(tmp_path / "longer.jsonl", [*mixed_lines(16), completion("late")]), tmp_path / "out"
    output.write_bytes(whole)
    assert len(run(lambda engine: answer_file(engine, longer, output))) == 1
    assert read_answers(output)[-1]["custom_id"] == "late"


def test_two_cannot_write_one_output(tmp_path):
    first = AnswerFile(tmp_path / "output.jsonl")
    with pytest.raises(ValueError, match="written by another process"):
        AnswerFile(tmp_path / "output.jsonl")
    first.close()
    AnswerFile(tmp_path / "output.jsonl").close()


# -- wrong lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ("[]", 400, "invalid_value"),
        ("{" * 100_000, 400, "invalid_json"),
        ('{"custom_id": "x"}', 400, "missing_field"),
        (completion("x") | {"method": "GET"}, 400, "invalid_value"),
        (completion("x") | {"url": "/v1/files"}, 400, "invalid_value"),
        (completion("x") | {"url": "/v1/chat/completions"}, 400, "missing_field"),
        (completion("x") | {"body": "text"}, 400, "invalid_value"),
        (completion("x") | {"body": {"model": "toy"}}, 400, "missing_field"),
        (completion("x") | {"surplus": 1}, 400, "unknown_field"),
        (completion("x" * 600), 400, "invalid_value"),
        (completion("x", stream=True), 400, None),
        (completion("x", max_tokens=-1), 400, "invalid_value"),
        (completion("x", prompt=[99]), 400, "invalid_value"),
        (completion("x", prompt=[]), 400, "invalid_value"),
        (completion("x", model="other"), 404, "model_not_found"),
        (completion("x", prompt="a" * 1000), 413, "line_too_long"),
    ],
)
def test_a_wrong_line_has_an_error_and_the_others_go_on(tmp_path, monkeypatch, line, status, code):
    if code == "line_too_long":
        monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 200)
    given, output = write_jsonl(tmp_path / "input", [completion("a"), line, completion("b")]), tmp_path / "output"
    run(lambda engine: answer_file(engine, given, output))
    first, wrong, last = read_answers(output)
    assert (first["custom_id"], last["custom_id"]) == ("a", "b")
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    assert wrong["response"]["status_code"] == status, wrong
    assert wrong["response"]["body"]["error"]["code"] == code
    if status != 413:
        assert wrong["custom_id"] in ("x", None)
    with given.open("rb") as file:
        assert count_lines(file) == 3


def test_fields_that_bodies_leave_out_come_from_defaults(tmp_path):
    plain = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1], "max_tokens": None}}
    given, output = write_jsonl(tmp_path / "input", [plain, completion("b", max_tokens=2)]), tmp_path / "output"
    defaults = {"model": "toy", "max_tokens": 3, "ignore_eos": True}
    run(lambda engine: answer_file(engine, given, output, defaults=defaults))
    used = [answer["response"]["body"]["usage"]["completion_tokens"] for answer in read_answers(output)]
    assert used == [3, 2]


# -- limits -----------------------------------------------------------------------------------------------------------


def test_max_cost_is_never_exceeded_and_later_runs_finish(given, whole):
    output, max_cost, runs, num_before = given.with_name("cost.jsonl"), 30, 0, 0
    while num_before < whole.count(b"\n"):
        with contextlib.suppress(CostLimitError):
            run(lambda engine: answer_file(engine, given, output, max_cost=max_cost))
        bodies = [answer["response"]["body"] for answer in read_answers(output)]
        used = [body["usage"]["total_tokens"] for body in bodies[num_before:] if "usage" in body]
        assert 0 < sum(used) <= max_cost
        num_before, runs = len(bodies), runs + 1
    assert runs > 2
    assert read_answers(output) == read_answers(whole)


def test_a_line_that_alone_costs_too_much_stops_the_run_with_what_it_costs(tmp_path):
    given, output = write_jsonl(tmp_path / "input", [completion("a", max_tokens=9)]), tmp_path / "output"
    with pytest.raises(CostLimitError, match="may come to 12 tokens and 11 are left"):
        run(lambda engine: answer_file(engine, given, output, max_cost=11))
    assert output.read_bytes() == b""


def test_answers_that_wait_for_a_slow_line_are_bounded(tmp_path, monkeypatch):
    """One long line at the beginning, and many short ones that end before it."""
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 2000)
    long = completion("long", max_tokens=50, ignore_eos=True)
    short = [completion(f"{i}", max_tokens=1) for i in range(60)]
    given, output = write_jsonl(tmp_path / "input", [long, *short]), tmp_path / "output"
    most = 0
    put = run_module.LineRunner._put

    def watched(self, *how):
        nonlocal most
        put(self, *how)
        most = max(most, self._held_bytes)

    monkeypatch.setattr(run_module.LineRunner, "_put", watched)
    run(lambda engine: answer_file(engine, given, output, in_flight=3))
    assert 0 < most < 2000 + 3 * 1000
    assert [answer["custom_id"] for answer in read_answers(output)] == ["long", *map(str, range(60))]


def test_an_engine_that_stops_leaves_a_beginning(given, whole):
    """While it drains, lines under way are still answered."""
    output, gate = given.with_name("drained.jsonl"), Gate()

    async def drained(engine):
        task = asyncio.create_task(answer_file(engine, given, output, in_flight=4))
        await asyncio.to_thread(gate.wait_until_held)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.01)
        gate.open()
        with pytest.raises(UnavailableError):
            await task
        await draining

    gate.let(5)
    run(drained, gate=gate)
    num_answered = output.read_bytes().count(b"\n")
    assert 0 < num_answered < 15
    assert read_answers(output) == read_answers(whole)[:num_answered]


# -- an engine that fails ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["before", "inside", "abort"])
def test_a_line_that_the_engine_gave_up_is_tried_again(given, whole, monkeypatch, how):
    """It is answered as if nothing had been; a fixed seed draws the same tokens."""
    monkeypatch.setattr(answer_module, "RETRY_WAIT_S", 0.0)
    output, gate = given.with_name(f"{how}.jsonl"), Gate()
    output.unlink(missing_ok=True)

    async def go(engine):
        task = asyncio.create_task(answer_file(engine, given, output, in_flight=4))
        for _ in range(2):
            await asyncio.to_thread(gate.wait_until_held)
            if how == "abort":
                streams = engine.streams
                assert streams
                for stream in streams:
                    stream.cancel()
            else:
                engine.llm.engine.runner.fail_next = how
            gate.let(4)
        await asyncio.to_thread(gate.wait_until_held)
        gate.open()
        await task
        return engine.num_failed_steps

    gate.let(3)
    num_failed = run(go, gate=gate)
    assert num_failed == (0 if how == "abort" else 2)
    assert read_answers(output) == read_answers(whole)


def test_a_line_under_which_steps_always_fail_stops_the_run_and_has_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_module, "RETRY_WAIT_S", 0.0)
    lines = [completion("a"), completion("b", prompt=[1] * 30), completion("c")]
    given, output = write_jsonl(tmp_path / "input", lines), tmp_path / "output"

    async def go(engine):
        runner = engine.llm.engine.runner
        inner = runner.run

        def fails_for_b(inputs):
            if any(len(stream.request.prompt_token_ids) == 30 for stream in engine.streams):
                raise RuntimeError("this prompt breaks it")
            return inner(inputs)

        monkeypatch.setattr(runner, "run", fails_for_b)
        with pytest.raises(UnavailableError, match="line 2 of the input failed inside the engine 3 times"):
            await answer_file(engine, given, output, in_flight=1)

    run(go)
    assert [answer["custom_id"] for answer in read_answers(output)] == ["a"]
    run(lambda engine: answer_file(engine, given, output))
    assert [answer["response"]["status_code"] for answer in read_answers(output)] == [200] * 3


def test_a_failure_that_is_the_lines_own_is_its_answer(tmp_path, monkeypatch):
    """No step failed: it would fail each time, and the others would wait for it."""
    given, output = write_jsonl(tmp_path / "input", [completion("a"), completion("b")]), tmp_path / "output"

    async def go(engine):
        thread = engine.engines.threads[0]
        post = thread._post_update

        def fails_for_a(state, *how):
            if state.request.id.startswith(first):
                raise ValueError("no such text")
            post(state, *how)

        with given.open("rb") as source:
            first = f"cmpl-{next(read_lines(source, '')).digest}"
        monkeypatch.setattr(thread, "_post_update", fails_for_a)
        await answer_file(engine, given, output)

    run(go)
    assert [answer["response"]["status_code"] for answer in read_answers(output)] == [500, 200]


def test_a_full_disk_ends_the_run(given, tmp_path, monkeypatch):
    def full(self, answer):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AnswerFile, "write", full)
    with pytest.raises(OSError, match="No space"):
        run(lambda engine: answer_file(engine, given, tmp_path / "output"))


# -- ids --------------------------------------------------------------------------------------------------------------


def check_ids_of(path) -> None:
    def lines():
        with path.open("rb") as file:
            yield from read_lines(file, "")

    lines_module.check_ids(lines)


def test_an_id_that_two_lines_have_is_refused_with_both(tmp_path):
    lines = [completion("a"), "", completion("b"), "no JSON", completion("b"), completion("a")]
    given = write_jsonl(tmp_path / "input", lines)
    with pytest.raises(
        ValueError, match=r"^line 5 repeats custom_id 'b' of line 3; give every line its own custom_id$"
    ):
        check_ids_of(given)


def test_lines_without_an_id_and_ids_with_equal_hashes_are_no_duplicates(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "hash", lambda name: len(name), raising=False)
    without = [completion(""), completion(""), "no JSON", "no JSON", "{}", "{}", completion("x" * 600)]
    given = write_jsonl(tmp_path / "input", [*without, completion("a"), completion("b"), completion("c")])
    check_ids_of(given)
    with pytest.raises(ValueError, match="line 4 repeats custom_id 'b' of line 2"):
        check_ids_of(write_jsonl(tmp_path / "input", [completion(name) for name in "abcb"]))
