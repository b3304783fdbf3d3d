"""Rows of Parquet as lines of a batch, and answers as columns beside them."""

import json

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.parquet as pq  # noqa: E402

from quire.cli.parquet import ParquetInput, answered_batch, batch_digest, check_columns, write_parquet  # noqa: E402


def rows_as_lines(tmp_path, **columns):
    path = tmp_path / "input.parquet"
    pq.write_table(pa.table(columns), path)
    given = ParquetInput(path)
    return given, [json.loads(line.raw or b"") for line in given.lines("")]


@pytest.mark.parametrize("prompts", [["a", "b", None], [[1, 2], [3], None]], ids=["text", "token ids"])
def test_a_prompt_is_text_or_token_ids(tmp_path, prompts):
    given, lines = rows_as_lines(tmp_path, prompt=prompts, label=[1, 2, 3])
    assert given.num_lines == 3
    assert [line["body"] for line in lines] == [{"prompt": prompt} for prompt in prompts]
    assert [line["custom_id"] for line in lines] == ["row-1", "row-2", "row-3"]
    assert {line["url"] for line in lines} == {"/v1/completions"}


def test_a_conversation_is_messages_or_their_json(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for messages in ([chat], [json.dumps(chat)]):
        _, (line,) = rows_as_lines(tmp_path, messages=messages, custom_id=[7])
        assert (line["custom_id"], line["url"]) == ("7", "/v1/chat/completions")
        assert line["body"]["messages"] == chat
    _, (line,) = rows_as_lines(tmp_path, messages=["no JSON"])
    assert line["body"]["messages"] == "no JSON", "its answer is an error"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())], ids=str)
def test_bytes_are_text(tmp_path, kind):
    """They were sent as base64, and answered as such."""
    prompts, ids = pa.array(["dos caf\u00e9s".encode(), None]).cast(kind), pa.array([b"a", b"b"]).cast(kind)
    _, lines = rows_as_lines(tmp_path, prompt=prompts, custom_id=ids)
    assert [line["body"]["prompt"] for line in lines] == ["dos caf\u00e9s", None]
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    chat = [{"role": "user", "content": "a"}]
    _, (line,) = rows_as_lines(tmp_path, messages=pa.array([json.dumps(chat).encode()]).cast(kind))
    assert line["body"]["messages"] == chat


def test_bytes_that_are_no_text_are_refused_with_their_row_and_column(tmp_path):
    path = tmp_path / "input.parquet"
    for column, values in {"prompt": [b"a", b"b"], "custom_id": [b"a", b"b"]}.items():
        columns = {"prompt": ["a", "b", "c"]} | {column: [*values, b"\xff"]}
        pq.write_table(pa.table(columns), path)
        with pytest.raises(ValueError, match=f"row 3, column '{column}' is bytes that are no UTF-8"):
            ParquetInput(path)
    messages = pa.array([[{"role": b"user", "content": b"a"}]])
    pq.write_table(pa.table({"messages": messages}), path)
    with pytest.raises(ValueError, match=r"column 'messages' is .*, with bytes inside: cast them to strings"):
        ParquetInput(path)


def test_ids_do_not_depend_on_how_rows_are_grouped(tmp_path):
    path, table = tmp_path / "input.parquet", pa.table({"prompt": [f"{i}" for i in range(5000)]})
    seen = []
    for size in (7, 5000):
        pq.write_table(table, path, row_group_size=size)
        seen.append([line.digest for line in ParquetInput(path).lines("")])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 5000


def test_answers_are_beside_their_rows(tmp_path):
    given, _ = rows_as_lines(tmp_path, prompt=["a"] * 3000, label=range(3000))
    answers, output = tmp_path / "answers", tmp_path / "output.parquet"
    with answers.open("w") as file:
        for i in range(3000):
            usage = {"prompt_tokens": 1, "completion_tokens": i}
            body = {"choices": [{"text": f"text {i}", "finish_reason": "stop"}], "usage": usage}
            error = {"code": "bad", "message": f"error {i}"} if i % 7 == 0 else None
            file.write(json.dumps({"custom_id": f"row-{i + 1}", "response": {"body": body}, "error": error}) + "\n")
    write_parquet(given, answers, output, b"digest")
    assert answered_batch(output) == b"digest"
    rows = pq.read_table(output).to_pylist()
    assert len(rows) == 3000
    for i, row in enumerate(rows):
        assert (row["prompt"], row["label"]) == ("a", i)
        assert row["error"] == (None if i % 7 else f"error {i}")
        assert row["generated_text"] == (f"text {i}" if i % 7 else None)
        assert row["completion_tokens"] == (i if i % 7 else None)


def test_an_output_is_known_by_its_batch_and_not_by_its_size(tmp_path):
    """Other lines, another order, another model or other flags make another batch."""
    digests = []
    for prompts, batch in ((["a", "b"], "A"), (["a", "c"], "A"), (["b", "a"], "A"), (["a"], "A"), (["a", "b"], "B")):
        given, _ = rows_as_lines(tmp_path, prompt=prompts)
        digests.append(batch_digest(given.lines(batch)))
        assert batch_digest(given.lines(batch)) == digests[-1]
    assert len(set(digests)) == 5
    assert answered_batch(tmp_path / "input.parquet") is None
    (tmp_path / "text.parquet").write_text("no Parquet")
    assert answered_batch(tmp_path / "text.parquet") is None


def test_files_that_do_not_fit_are_refused(tmp_path):
    given, _ = rows_as_lines(tmp_path, prompt=["a"], error=["b"])
    with pytest.raises(ValueError, match="'error', which answers are written to"):
        check_columns(given)
    with pytest.raises(ValueError, match="needs a column 'prompt' or one 'messages'"):
        rows_as_lines(tmp_path, text=["a"])
    (tmp_path / "text.parquet").write_text("no Parquet")
    with pytest.raises(ValueError, match="is no Parquet file"):
        ParquetInput(tmp_path / "text.parquet")
