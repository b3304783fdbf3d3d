"""`quire batch`: killed at any moment and started again, it writes what one run would have written."""

import json
import random
import re
import signal
import subprocess
import time

import pytest

from tests.batch_files import read_answers, write_jsonl
from tests.server.process import LONGEST_S, PYTHON, SMALL

pytestmark = pytest.mark.own_server


def lines(count: int) -> list[dict]:
    """Short prompts of many kinds; a few of them are wrong."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 24)))
        how = {"max_tokens": rng.randint(1, 8), "temperature": rng.choice([0, 0.8])}
        is_chat = i % 3 == 0
        body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        url = "/v1/chat/completions" if is_chat else "/v1/completions"
        made.append({"custom_id": f"line-{i}", "method": "POST", "url": url, "body": body | how})
    for i in range(5, count, 97):
        made[i]["body"]["max_tokens"] = -1
    return made


def batch(model, given, output, *flags):
    files = [str(model), str(given), "-o", str(output)]
    # In bfloat16 a token is the same in any batch, to the last bit; in float32 one of many thousands is not.
    command = [*PYTHON, "-m", "quire", "batch", *files, *SMALL, "--dtype", "bfloat16", *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish(process, status: int = 0) -> str:
    _, errors = process.communicate(timeout=LONGEST_S)
    assert process.returncode == status, errors
    return errors


@pytest.mark.parametrize(
    ("count", "kills"),
    [(300, 4), pytest.param(20_000, 20, marks=[pytest.mark.slow, pytest.mark.nightly])],
)
def test_killed_at_random_moments_it_writes_what_one_run_would(tiny_folder, tmp_path, count, kills):
    given = write_jsonl(tmp_path / "input.jsonl", lines(count))
    one_run, output = tmp_path / "one.jsonl", tmp_path / "output.jsonl"
    said = finish(batch(tiny_folder, given, one_run), 1)
    assert f"all {count:,} lines are answered, {len(range(5, count, 97))} of them with an error" in said
    rng, killed_at = random.Random(1), []
    for kill in range(kills):
        process = batch(tiny_folder, given, output)
        # The moment is a number of bytes: how fast the machine is does not matter.
        size = one_run.stat().st_size * (kill + rng.random()) / kills
        deadline = time.monotonic() + LONGEST_S
        while process.poll() is None and (not output.exists() or output.stat().st_size < size):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed_at.append(output.read_bytes().count(b"\n"))
    finish(batch(tiny_folder, given, output), 1)
    answers = read_answers(output)
    assert answers == read_answers(one_run), killed_at
    assert [answer["custom_id"] for answer in answers] == [f"line-{i}" for i in range(count)]
    assert killed_at == sorted(killed_at), "nothing that was written is lost"
    assert len(set(killed_at)) > 2
    before = output.read_bytes()
    assert f"all {count:,} lines are answered" in finish(batch(tiny_folder, given, output), 1), "without a model"
    assert output.read_bytes() == before


def test_max_cost_stops_it_and_the_same_command_goes_on(tiny_folder, tmp_path):
    given, output = write_jsonl(tmp_path / "input.jsonl", lines(40)), tmp_path / "output.jsonl"
    seen = 0
    for status in (3, 1):  # one of the lines has an error
        flags = ("--max-cost", "500" if status == 3 else "100000")
        said = finish(batch(tiny_folder, given, output, *flags), status)
        assert ("--max-cost 500: stopped after" in said) == (status == 3)
        answers = read_answers(output)
        used = sum(answer["response"]["body"].get("usage", {}).get("total_tokens", 0) for answer in answers[seen:])
        assert used <= int(flags[1])
        assert len(answers) > seen
        seen = len(answers)
    assert seen == 40


def test_the_exit_status_is_1_if_any_line_has_an_error(tiny_folder, tmp_path):
    given, output = write_jsonl(tmp_path / "some.jsonl", lines(7)), tmp_path / "some-output.jsonl"
    for _ in range(2):  # again: there is nothing left to do
        assert "all 7 lines are answered, 1 of them with an error" in finish(batch(tiny_folder, given, output), 1)
    wrong = [line | {"body": line["body"] | {"max_tokens": -1}} for line in lines(3)]
    given, output = write_jsonl(tmp_path / "input.jsonl", wrong), tmp_path / "output.jsonl"
    for _ in range(2):  # again: there is nothing left to do
        assert "all 3 lines are answered, 3 of them with an error" in finish(batch(tiny_folder, given, output), 1)
    assert [answer["response"]["status_code"] for answer in read_answers(output)] == [400] * 3
    output = tmp_path / "output.parquet"
    for _ in range(2):
        assert "all 3 lines are answered, 3 of them with an error" in finish(batch(tiny_folder, given, output), 1)


def test_wrong_files_and_flags_are_told_before_a_model_is_loaded(tiny_folder, tmp_path):
    given, output = write_jsonl(tmp_path / "input.jsonl", lines(3)), tmp_path / "output.jsonl"
    assert "is no file" in finish(batch(tiny_folder, tmp_path / "none.jsonl", output), 2)
    assert "is the input" in finish(batch(tiny_folder, given, given), 2)
    before = given.read_bytes()
    derived = tmp_path / "derived.parquet.jsonl"
    derived.hardlink_to(given)
    assert "is the input" in finish(batch(tiny_folder, given, tmp_path / "derived.parquet"), 2)
    assert given.read_bytes() == before
    assert "--max-cost" in finish(batch(tiny_folder, given, output, "--max-cost", "0"), 2)
    assert "cannot be written" in finish(batch(tiny_folder, given, tmp_path / "no" / "folder.jsonl"), 2)
    twice = write_jsonl(tmp_path / "twice.jsonl", [*lines(2), lines(1)[0]])
    said = finish(batch(tmp_path / "no-model", twice, output), 2)
    assert f"INPUT {twice}: line 3 repeats custom_id 'line-0' of line 1; give every line its own" in said
    output.write_text('{"id": "batch_req_of_something_else", "error": null}\n')
    assert "is not the answer to its line" in finish(batch(tiny_folder, given, output), 2)
    notes = tmp_path / "notes.csv"
    notes.write_text("id,value\n1,2\n")
    assert "is not the answer to its line" in finish(batch(tmp_path / "no-model", given, notes), 2)
    assert notes.read_text() == "id,value\n1,2\n"


def test_parquet_rows_keep_their_columns_and_get_answers(tiny_folder, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    prompts = ["hello", "good day", None, "one more"]
    given, output = tmp_path / "input.parquet", tmp_path / "output.parquet"
    pq.write_table(pa.table({"prompt": prompts, "label": [3, 1, 4, 1]}), given)
    finish(batch(tiny_folder, given, output, "--max-tokens", "4", "--temperature", "0"), 1)
    table = pq.read_table(output)
    assert table.column("label").to_pylist() == [3, 1, 4, 1]
    rows = table.to_pylist()
    assert [row["error"] is not None for row in rows] == [False, False, True, False]
    assert rows[0]["completion_tokens"] <= 4
    assert json.loads(rows[0]["response"])["choices"][0]["text"] == rows[0]["generated_text"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.parquet", "output.parquet"]
    chats = tmp_path / "chats.parquet"
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts[:2]]
    pq.write_table(pa.table({"messages": messages, "custom_id": ["a", "b"]}), chats)
    as_lines, of_lines = tmp_path / "chats.jsonl", tmp_path / "chats-of-lines.parquet"
    finish(batch(tiny_folder, chats, as_lines, "--max-tokens", "4", "--temperature", "0"))
    assert [answer["custom_id"] for answer in read_answers(as_lines)] == ["a", "b"]
    assert {answer["response"]["status_code"] for answer in read_answers(as_lines)} == {200}
    finish(batch(tiny_folder, write_jsonl(tmp_path / "lines.jsonl", lines(3)), of_lines))
    assert pq.read_table(of_lines).column("custom_id").to_pylist() == ["line-0", "line-1", "line-2"]


def test_a_parquet_output_goes_on_where_it_was_stopped(tiny_folder, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    given, output = tmp_path / "input.parquet", tmp_path / "output.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(12)]}), given)
    finish(batch(tiny_folder, given, output, "--max-tokens", "4", "--max-cost", "60"), 3)
    assert not output.exists()
    finish(batch(tiny_folder, given, output, "--max-tokens", "4"))
    assert pq.read_table(output).num_rows == 12
    before = output.read_bytes()
    assert "all 12 lines are answered" in finish(batch(tiny_folder, given, output, "--max-tokens", "4"))
    assert "is not made from" in finish(batch(tiny_folder, given, output, "--max-tokens", "5"), 2)
    (tmp_path / "output.parquet.jsonl").touch()
    assert "is not made from" in finish(batch(tiny_folder, given, output, "--max-tokens", "5"), 2)
    assert output.read_bytes() == before
    taken = tmp_path / "taken.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"]}), taken)
    assert "'response', which answers are written to" in finish(batch(tiny_folder, taken, tmp_path / "o.parquet"), 2)
    neither = tmp_path / "neither.parquet"
    pq.write_table(pa.table({"text": ["a"]}), neither)
    assert "needs a column 'prompt'" in finish(batch(tiny_folder, neither, tmp_path / "o.parquet"), 2)


def test_a_line_that_costs_more_than_a_run_may_says_what_it_takes(tiny_folder, tmp_path):
    given, output = write_jsonl(tmp_path / "input.jsonl", lines(2)), tmp_path / "output.jsonl"
    said = finish(batch(tiny_folder, given, output, "--max-tokens", "20", "--max-cost", "5"), 3)
    cost = int(re.search(r"the next line may come to (\d+) tokens and 5 are left", said)[1])
    assert f"the same command goes on with --max-cost {cost} or more" in said
