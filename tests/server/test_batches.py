"""`/v1/files` and `/v1/batches`: OpenAI's client, limits, tenants, restarts, and clients who wait go first."""

import contextlib
import io
import json
import os
import signal
import time

import openai
import pytest

from tests.batch_files import read_answers
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = pytest.mark.own_server
KEYS = ("first-key-of-tests", "second-key-of-tests")
FLAGS = ("--max-batch-file-bytes", "200000", "--max-batch-bytes", "1000000")


def flags(folder) -> list[str]:
    keys = [part for key in KEYS for part in ("--api-key", key)]
    return [*SMALL, *keys, *FLAGS, "--batch-folder", str(folder)]


CLIENTS: list[openai.OpenAI] = []


def client(server, key: str = KEYS[0]) -> openai.OpenAI:
    CLIENTS.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=LONGEST_S))
    return CLIENTS[-1]


@pytest.fixture(autouse=True)
def close_clients():
    yield
    while CLIENTS:
        CLIENTS.pop().close()


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    with serving(tiny_folder, *flags(tmp_path_factory.mktemp("batches"))) as running:
        yield running


def line(custom_id: str, url: str = "/v1/completions", **body) -> dict:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(api: openai.OpenAI, lines: list) -> str:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    return api.files.create(file=("input.jsonl", io.BytesIO(text.encode())), purpose="batch").id


def create(api: openai.OpenAI, lines: list, endpoint: str = "/v1/completions", **how):
    return api.batches.create(input_file_id=upload(api, lines), endpoint=endpoint, completion_window="24h", **how)  # type: ignore[call-overload]


def wait_for(api: openai.OpenAI, batch_id: str, *statuses: str):
    deadline = time.monotonic() + LONGEST_S
    while (batch := api.batches.retrieve(batch_id)).status not in (statuses or ("completed", "failed", "cancelled")):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def refused(status: int, code: str | None = None):
    @contextlib.contextmanager
    def check():
        with pytest.raises(openai.APIStatusError) as caught:
            yield
        assert caught.value.status_code == status, caught.value
        assert code is None or caught.value.code == code, caught.value

    return check()


# -- OpenAI's client --------------------------------------------------------------------------------------------------


def test_a_batch_from_its_file_to_its_answers(server):
    api = client(server)
    lines = [line(f"line-{i}", prompt=f"prompt {i}") for i in range(20)]
    lines[7] = line("wrong", max_tokens=-1)
    lines[9] = line("another route", "/v1/embeddings", model="tiny", input="hello")
    batch = create(api, [*lines, "", "no JSON"], metadata={"for": "a test"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", "/v1/completions")
    assert batch.metadata == {"for": "a test"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = wait_for(api, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (21, 18, 3)
    assert batch.output_file_id
    assert batch.error_file_id
    answers = read_answers(api.files.content(batch.output_file_id).content)
    assert [answer["custom_id"] for answer in answers] == [f"line-{i}" for i in range(20) if i not in (7, 9)]
    same = api.completions.create(model="tiny", prompt="prompt 3", max_tokens=4, temperature=0)
    assert answers[3]["response"]["body"]["choices"][0]["text"] == same.choices[0].text
    errors = read_answers(api.files.content(batch.error_file_id).content)
    assert [error["custom_id"] for error in errors] == ["wrong", "another route", None]
    assert [error["response"]["status_code"] for error in errors] == [400, 400, 400]
    assert errors[1]["error"]["code"] == "mismatched_url"
    file = api.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len(api.files.content(file.id).content)


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/embeddings"])
def test_chats_and_embeddings_too(server, endpoint):
    api = client(server)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3} if "chat" in endpoint else {"input": "hi"}
    one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": "tiny"} | body}
    batch = wait_for(api, create(api, [one, one | {"custom_id": "b"}], endpoint).id)
    assert batch.output_file_id
    answers = read_answers(api.files.content(batch.output_file_id).content)
    assert [(answer["custom_id"], answer["response"]["status_code"]) for answer in answers] == [("a", 200), ("b", 200)]
    assert answers[0]["response"]["body"]["object"] == ("chat.completion" if "chat" in endpoint else "list")


def test_files_and_batches_are_listed_in_pages_and_files_deleted(server):
    api = client(server)
    made = [create(api, [line("a")]) for _ in range(3)]
    for batch in made:
        wait_for(api, batch.id)
    listed = [batch.id for batch in api.batches.list(limit=2)]
    assert set(listed) >= {batch.id for batch in made}
    assert len(listed) == len(set(listed))
    assert not api.batches.list(limit=100).has_more
    inputs = [file.id for file in api.files.list(purpose="batch", limit=2)]
    assert {batch.input_file_id for batch in made} <= set(inputs)
    assert [file.id for file in api.files.list(purpose="batch", order="asc")] == list(
        reversed([file.id for file in api.files.list(purpose="batch", order="desc")])
    )
    assert api.files.delete(made[0].input_file_id).deleted
    with refused(404, "file_not_found"):
        api.files.retrieve(made[0].input_file_id)
    for file in api.files.list():
        api.files.delete(file.id)
    assert not list(api.files.list())


def test_a_cancelled_batch_keeps_what_it_has(server):
    api = client(server)
    batch = create(api, [line(f"{i}", max_tokens=400, ignore_eos=True) for i in range(300)])
    deadline = time.monotonic() + LONGEST_S
    while not api.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with refused(400, "file_in_use"):
        api.files.delete(batch.input_file_id)
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = wait_for(api, batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at
    assert batch.output_file_id
    answers = read_answers(api.files.content(batch.output_file_id).content)
    assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(len(answers))]
    assert 0 < len(answers) < 300
    with refused(400, "batch_ended"):
        api.batches.cancel(batch.id)
    server.wait_idle()


# -- what may not be --------------------------------------------------------------------------------------------------


def test_one_key_never_sees_what_another_has(server):
    mine, other = client(server), client(server, KEYS[1])
    batch = wait_for(mine, create(mine, [line("secret")]).id)
    assert batch.output_file_id
    for file_id in (batch.input_file_id, batch.output_file_id):
        for ask in (other.files.retrieve, other.files.content, other.files.delete):
            with refused(404, "file_not_found"):
                ask(file_id)
    for ask in (other.batches.retrieve, other.batches.cancel):
        with refused(404, "batch_not_found"):
            ask(batch.id)
    with refused(404, "file_not_found"):
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert not list(other.files.list())
    assert not list(other.batches.list())
    with refused(400):
        list(other.batches.list(after=batch.id))
    assert mine.files.retrieve(batch.input_file_id).id == batch.input_file_id


@pytest.mark.parametrize(
    "name", ["../lock", "..%2flock", "file-0/../lock", "lock", "file-" + "0" * 32, "%00", "x" * 500]
)
def test_no_name_leads_out_of_the_folder(server, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        status, body = server.get(path, authorization=f"Bearer {KEYS[0]}")
        assert status == 404, body


def multipart(*parts: tuple[str, bytes], boundary: str = "xyz", end: bool = True) -> bytes:
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    )
    return body + (f"--{boundary}--\r\n".encode() if end else b"")


FILE, PURPOSE = ('name="file"; filename="a.jsonl"', b"{}\n"), ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (multipart(FILE, PURPOSE), 200),
        (multipart(PURPOSE, FILE), 200),
        (multipart(FILE, PURPOSE, end=False), 400),
        (multipart(FILE), 400),
        (multipart(PURPOSE), 400),
        (multipart(FILE, FILE, PURPOSE), 400),
        (multipart(FILE, ('name="purpose"', b"fine-tune")), 400),
        (multipart(FILE, PURPOSE, ('name="expires_after[seconds]"', b"3600")), 400),
        (multipart(FILE, PURPOSE, *[(f'name="x{i}"', b"") for i in range(9)]), 400),
        (multipart(FILE, ('name="purpose"', b"x" * 10_000)), 400),
        (multipart((FILE[0], b"x" * 200_001), PURPOSE), 413),
        (multipart((FILE[0], b"x" * 400_000), PURPOSE), 413),
        (multipart(FILE, PURPOSE, boundary="other"), 400),
        (b"", 400),
        (b"nonsense", 400),
    ],
)
def test_an_upload_is_a_file_for_a_batch_or_refused(server, body, status):
    how = {"content_type": "multipart/form-data; boundary=xyz", "authorization": f"Bearer {KEYS[1]}"}
    got, answer = server.ask("POST", "/v1/files", body, **how)
    assert got == status, answer
    answer = json.loads(answer)
    assert set(answer.get("error", {"message": 0, "type": 0, "param": 0, "code": 0})) == {
        "message", "type", "param", "code",
    }  # fmt: skip
    if status == 200:
        assert client(server, KEYS[1]).files.content(answer["id"]).content == b"{}\n"
        client(server, KEYS[1]).files.delete(answer["id"])
    assert not list(client(server, KEYS[1]).files.list())


def test_what_a_key_may_store_is_bounded(server):
    api = client(server, KEYS[1])
    content, ids = b"x" * 199_000, []
    with refused(413, "storage_full"):
        for _ in range(6):
            ids.append(api.files.create(file=("a", io.BytesIO(content)), purpose="batch").id)
    assert len(ids) == 5
    assert client(server).files.create(file=("a", io.BytesIO(b"{}")), purpose="batch").id, "others have their own room"
    for file_id in ids:
        api.files.delete(file_id)
    assert api.files.create(file=("a", io.BytesIO(content)), purpose="batch").id
    for file in api.files.list():
        api.files.delete(file.id)


def test_a_batch_that_fills_the_store_fails_with_what_it_has(server):
    api = client(server, KEYS[1])
    lines = [line(f"{i}", prompt="a", max_tokens=120, logprobs=5, ignore_eos=True) for i in range(300)]
    batch = wait_for(api, create(api, lines).id)
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert batch.errors.data[0].code == "storage_full"
    assert batch.output_file_id
    assert len(read_answers(api.files.content(batch.output_file_id).content)) > 0
    for file in api.files.list():
        api.files.delete(file.id)


def test_an_empty_upload_is_refused(server):
    with pytest.raises(openai.BadRequestError, match="the file is empty: send one request a line, as JSON") as caught:
        upload(client(server), [])
    assert (caught.value.param, caught.value.code) == ("file", "invalid_upload")


def test_an_id_that_two_lines_have_fails_the_batch_before_a_line_runs(server):
    api = client(server)
    batch = wait_for(api, create(api, [line("a"), line("b"), line("a")]).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors
    assert batch.errors.data
    (error,) = batch.errors.data
    assert (error.code, error.param, error.line) == ("duplicate_custom_id", "custom_id", 3)
    assert error.message == "line 3 repeats custom_id 'a' of line 1; give every line its own custom_id"


def test_a_file_without_lines_fails(server):
    api = client(server)
    batch = wait_for(api, create(api, ["", "  "]).id)
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert "0 lines" in str(batch.errors.data[0].message)


@pytest.mark.parametrize(
    "changed",
    [{"endpoint": "/v1/files"}, {"completion_window": "1h"}, {"output_expires_after": {"anchor": "created_at"}},
     {"metadata": {"a": 1}}, {"metadata": {"a": "x" * 600}}],
)  # fmt: skip
def test_what_a_batch_cannot_be_is_refused(server, changed):
    api = client(server)
    body = {"input_file_id": upload(api, [line("a")]), "endpoint": "/v1/completions", "completion_window": "24h"}
    status, answer = server.post("/v1/batches", body | changed, authorization=f"Bearer {KEYS[0]}")
    assert status == 400, answer


def test_without_a_folder_the_routes_say_so(tiny_folder):
    with serving(tiny_folder, *SMALL) as plain:
        api = client(plain)
        for ask in (
            lambda: upload(api, [line("a")]),
            lambda: list(api.files.list()),
            lambda: api.batches.retrieve("batch_0"),
            lambda: api.batches.create(input_file_id="a", endpoint="/v1/completions", completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError, match="--batch-folder"):
                ask()


# -- restarts and others ----------------------------------------------------------------------------------------------


def test_a_batch_goes_on_after_a_restart_and_answers_no_line_twice(tiny_folder, tmp_path):
    lines = [line(f"{i}", prompt=f"prompt {i}", max_tokens=20, ignore_eos=True) for i in range(200)]
    folder, batch_id = tmp_path / "batches", ""
    for turn in range(4):
        with serving(tiny_folder, *flags(folder)) as running:
            api = client(running)
            if not turn:
                batch_id = create(api, lines).id
            else:
                # It goes on before anybody asks for it; SIGKILL, but once a signal that lets it stop by itself.
                assert api.batches.retrieve(batch_id).status in ("validating", "in_progress", "finalizing", "completed")
            deadline = time.monotonic() + LONGEST_S
            while turn < 3 and api.batches.retrieve(batch_id).request_counts.completed < 20 * (turn + 1):  # type: ignore[union-attr]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if turn == 1:
                assert running.terminate() == 0
            if turn == 3:
                batch = wait_for(api, batch_id)
                assert batch.status == "completed"
                assert batch.output_file_id
                answers = read_answers(api.files.content(batch.output_file_id).content)
    assert [answer["custom_id"] for answer in answers] == [f"{i}" for i in range(200)]
    left = [path.name for path in folder.rglob("*") if path.is_file() and path.suffix not in (".json", "")]
    assert left == [], "nothing half done is left"


def test_two_servers_cannot_share_a_folder(tiny_folder, tmp_path):
    folder = tmp_path / "batches"
    is_in_use = pytest.raises(RuntimeError, match="in use by another server")
    with serving(tiny_folder, *flags(folder)), is_in_use, serving(tiny_folder, *flags(folder)):
        pass


def test_a_client_that_waits_goes_before_a_batch(server):
    """The batch has more lines under way than there are rows; who asks now is answered long before it ends."""
    api = client(server)
    batch = create(api, [line(f"{i}", max_tokens=300, ignore_eos=True) for i in range(400)])
    wait_for(api, batch.id, "in_progress")
    deadline = time.monotonic() + LONGEST_S
    while not server.metric("quire_sequences_running"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for _ in range(5):
        answer = api.completions.create(model="tiny", prompt="hello", max_tokens=8, temperature=0)
        assert answer.usage
    counts = api.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed < 400
    api.batches.cancel(batch.id)
    assert wait_for(api, batch.id).status == "cancelled"


def test_sighup_resumes_batches_of_a_key_that_is_valid_again(tiny_folder, tmp_path):
    keys, folder = tmp_path / "api-keys", tmp_path / "batches"

    def write_keys(*names: str) -> None:
        keys.write_text("".join(f"{name}\n" for name in names))
        keys.chmod(0o600)

    def flags() -> list[str]:
        return [*SMALL, *FLAGS, "--api-key-file", str(keys), "--batch-folder", str(folder)]

    write_keys(*KEYS)
    with serving(tiny_folder, *flags()) as first:
        batch = create(client(first), [line(str(i), max_tokens=400, ignore_eos=True) for i in range(16)])
        first.terminate()
    write_keys(KEYS[1])
    with serving(tiny_folder, *flags()) as second:
        write_keys(*KEYS)
        os.kill(second.process.pid, signal.SIGHUP)
        second.wait_for_line('"event": "keys reloaded"')
        assert wait_for(client(second), batch.id, "completed").request_counts.completed == 16
