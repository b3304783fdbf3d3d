"""The key file: what a line may say, what a wrong one is told, and that it can be read again while a server runs."""

import asyncio
import hashlib
import logging
import math
import signal
from typing import Any, cast

import pytest

from quire.async_llm.admission import Limits
from quire.server.config import ServerConfig
from quire.server.keys import Keys
from quire.server.serve import _reload_keys, _reload_on_hangup

KEY, OTHER = "a-key-of-alice", "a-key-of-bob"
SECOND = "sk_secret=of=another"
"""A key that looks like a field."""


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys"

    def write(text: str):
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def test_a_line_names_a_key_and_its_share_and_limits(key_file):
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    file = key_file(
        f"# the team\n\n{KEY} name=alice weight=2 requests=8 queued_tokens=100000 # until June\nsha256:{hashed} "
        "tokens_per_minute=60000\n"
    )
    keys = Keys(file=file, limits=Limits(requests=4))
    alice, bob = keys.find(KEY), keys.find(OTHER)
    assert alice
    assert bob
    assert (alice.name, alice.weight, alice.limits) == ("alice", 2, Limits(8, 100_000, math.inf))
    assert (bob.weight, bob.limits) == (1, Limits(4, math.inf, 60_000)), (
        "what a line leaves out is the server's default"
    )
    assert bob.name == f"key-{bob.tenant[:8]}"
    assert len({alice.tenant, bob.tenant}) == len(keys) == 2
    assert keys.callers == [alice, bob]


def test_a_key_means_the_same_however_it_is_given(key_file):
    """A tenant's cache, files and batches outlive a change from a flag to a file, and from a key to its hash."""
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    given = [Keys(given=[KEY]), Keys(file=key_file(f"{KEY}\n")), Keys(file=key_file(f"sha256:{hashed} weight=3\n"))]
    assert len({caller.tenant for keys in given if (caller := keys.find(KEY))}) == 1
    both = Keys(given=[KEY], file=key_file(f"{KEY} name=alice\n"))
    assert [caller.name for caller in both.callers] == ["alice"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("name=a", "a key must be at least 8 printable ASCII characters without spaces"),
        (f"{KEY} nam=a", "word 2 is not FIELD=VALUE with a known field; after the key, use name, weight, requests, qu"),
        (f"{KEY} {SECOND}", "word 2 is not FIELD=VALUE with a known field; after the key, use name"),
        (f"{KEY} {OTHER}", "word 2 is not FIELD=VALUE with a known field; after the key, use name"),
        (f"{KEY} name=", "name=''; use 1 to 64 of A-Z"),
        (f"{KEY} name=two,words", "name='two,words'; use 1 to 64 of A-Z"),
        (f"{KEY} weight=0", "weight=0 must be a whole number from 1 to 1,000"),
        (f"{KEY} weight=1.5", "weight=1.5 must be a whole number"),
        (f"{KEY} requests=-1", "requests=-1 must be a whole number"),
        (f"{KEY} requests=99999999999999999999", "must be a whole number"),
        (f"{KEY} tokens_per_minute=1e6", "tokens_per_minute=1e6 must be a whole number"),
        (f"{KEY} weight=1 weight=2", "weight is set twice; remove one of them"),
        (f"another-key\n{KEY}", "the key of line 1 again; remove one of them"),
    ],
)
def test_a_wrong_line_is_named_with_its_field_and_never_quoted(key_file, line, expected):
    file = key_file(f"{KEY}\n{line}\n" if "again" in expected else f"another-good-key\n{line}\n")
    with pytest.raises(ValueError, match=r"^keys, line [23]: ") as wrong:
        Keys(file=file)
    assert expected in str(wrong.value)
    assert KEY not in str(wrong.value)
    assert OTHER not in str(wrong.value)
    assert "secret" not in str(wrong.value)


def test_administrators_keys_have_names_and_no_limits(key_file):
    assert Keys(file=key_file(f"{KEY} name=ops\n"), fields=("name",)).callers[0].name == "ops"
    with pytest.raises(ValueError, match=r"word 2 is not FIELD=VALUE with a known field; after the key, use name$"):
        Keys(file=key_file(f"{KEY} weight=2\n"), fields=("name",))


def test_a_file_is_read_again_and_a_wrong_one_changes_nothing(key_file):
    keys = Keys(given=["a-key-that-was-given"], file=key_file(f"{KEY}\n"))
    key_file(f"{OTHER} weight=7\n")
    keys.reload()
    assert keys.find(KEY) is None
    assert keys.find("a-key-that-was-given")
    key_file("short\n")
    with pytest.raises(ValueError, match="keys, line 1"):
        keys.reload()
    key_file("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        keys.reload()
    (caller,) = [caller for caller in keys.callers if caller.weight == 7]
    assert keys.find(OTHER) == caller


class Weights:
    """The part of an engine that keys have to do with."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}

    def set_tenant_weights(self, weights: dict[str, float]) -> None:
        self.weights = weights


def test_a_reload_reports_a_file_that_every_user_can_read(key_file, caplog):
    file = key_file(f"{KEY}\n")
    keys, engine = Keys(file=file), cast(Any, Weights())
    file.chmod(0o644)
    _reload_keys(ServerConfig(), keys, Keys(flag="--admin-key"), engine)
    assert "--api-key-file keys can be read by every user" in caplog.text


@pytest.mark.parametrize("what", ["missing", "no text"])
def test_a_file_that_cannot_be_read_is_logged_without_its_folder(key_file, caplog, what):
    file = key_file(f"{KEY}\n")
    keys = Keys(file=file)
    if what == "missing":
        file.unlink()
    else:
        file.write_bytes(b"\xff" * 20)
    _reload_keys(ServerConfig(), keys, Keys(flag="--admin-key"), cast(Any, Weights()))
    (record,) = caplog.records
    reason = "No such file or directory" if what == "missing" else "it is not UTF-8"
    assert vars(record)["detail"] == f"--api-key-file keys cannot be read: {reason}"
    assert str(file.parent) not in repr(vars(record))


@pytest.mark.parametrize("wrong", ["short\n", f"{OTHER} weight=1\n", f"{OTHER}\n", ""])
def test_two_files_are_read_again_together_or_neither_is(tmp_path, wrong):
    files = [tmp_path / "keys", tmp_path / "admin-keys"]

    def write(*texts: str) -> None:
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
            file.chmod(0o600)

    admin = "a-key-of-an-admin"
    write(f"{KEY}\n", f"{admin}\n")
    keys, admin_keys = Keys(file=files[0]), Keys(file=files[1], flag="--admin-key", fields=("name",))
    engine: Any = Weights()
    write(f"{OTHER} weight=7\n", wrong)
    _reload_keys(ServerConfig(), keys, admin_keys, engine)
    assert keys.find(KEY)
    assert keys.find(OTHER) is None
    assert admin_keys.find(admin)
    assert engine.weights == {}
    write(f"{admin} weight=7\n", f"{KEY}\n")  # each key in the other file
    _reload_keys(ServerConfig(), keys, admin_keys, engine)
    caller = keys.find(admin)
    assert caller
    assert keys.find_tenant(caller.tenant) == caller
    assert engine.weights == {caller.tenant: 7}
    assert admin_keys.find(KEY)
    assert admin_keys.find(admin) is None


@pytest.mark.parametrize("has_file", [False, True])
def test_sighup_stays_the_end_of_a_server_without_a_key_file(key_file, has_file):
    """The system sends it to the programs of a terminal that is closed."""
    keys, engine = Keys(file=key_file(f"{KEY}\n")) if has_file else Keys([KEY]), Weights()

    async def install() -> Any:
        _reload_on_hangup(ServerConfig(), keys, Keys(), cast(Any, engine))
        return signal.getsignal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert (asyncio.run(install()) is signal.SIG_DFL) == (not has_file)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("mode", "is_reported"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_every_user_can_read_is_reported(key_file, caplog, mode, is_reported):
    file = key_file(f"{KEY}\n")
    file.chmod(mode)
    with caplog.at_level(logging.WARNING, "quire.server"):
        keys = Keys(file=file, flag="--admin-key")
        assert not caplog.records, "the log is not set up yet when a command reads its keys"
        keys.report_exposed_file()
    assert [record.getMessage() for record in caplog.records] == [
        "--admin-key-file keys can be read by every user of this machine: take the right from them (chmod o=)"
    ] * is_reported


def test_everyone_on_a_server_without_keys_is_one_caller():
    keys = Keys(limits=Limits(requests=3))
    assert len(keys) == 0
    assert keys.callers == [keys.everyone]
    assert (keys.everyone.tenant, keys.everyone.limits) == ("", Limits(requests=3))
