"""A router that hears of a replica by its events: it knows what the replica has, and is not fooled."""

import re
from pathlib import Path

import pytest

from quire.routing import Choice, ReplicaFeed, Router, prompt_hashes

PROMPT = prompt_hashes(range(40), page_size=4)
HEX = [name.hex() for name in PROMPT]


def fed(router: Router, name: str = "pod") -> ReplicaFeed:
    feed = ReplicaFeed(router, name)
    feed.take("load", {"engine": 0, "queued_tokens": 0, "has_room": True, "is_draining": False})
    feed.take("snapshot", {"engine": 0, "number": 5, "hashes": HEX[:2], "more": True})
    feed.take("snapshot", {"engine": 0, "number": 5, "hashes": HEX[2:4], "more": False})
    return feed


def test_pages_come_and_go_and_a_new_snapshot_replaces_them():
    router = Router()
    feed = fed(router)
    assert router.choose(PROMPT) == Choice("pod/0", 4)
    feed.take("pages", {"engine": 0, "number": 6, "published": HEX[4:6], "removed": []})
    assert router.choose(PROMPT) == Choice("pod/0", 6)
    feed.take("pages", {"engine": 0, "number": 7, "published": [], "removed": HEX[3:4]})
    assert router.choose(PROMPT) == Choice("pod/0", 3)
    feed.take("snapshot", {"engine": 0, "number": 9, "hashes": HEX[:1], "more": False})
    assert router.choose(PROMPT) == Choice("pod/0", 1)
    feed.take("load", {"engine": 0, "queued_tokens": 7, "has_room": True, "is_draining": True})
    assert router.choose(PROMPT) is None


def test_closing_forgets_one_replica_only():
    router = Router()
    feed, _ = fed(router), fed(router, "pod/0")
    feed.close()
    assert set(router.engines) == {"pod/0/0"}
    assert router.pages.num_pages("pod/0") == 0
    assert router.pages.num_pages("pod/0/0") == 4


def test_being_cut_off_is_an_error():
    with pytest.raises(ConnectionError, match="connect again"):
        fed(Router()).take("cut", {"reason": "slow"})


def test_other_kinds_are_for_those_who_know_them():
    router = Router()
    fed(router).take("of a later version", {"engine": 0})
    assert router.choose(PROMPT) == Choice("pod/0", 4)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("pages", {"engine": 0, "number": 7, "published": [], "removed": []}, "number=7 .* does not follow 5"),
        ("pages", {"engine": 1, "number": 1, "published": [], "removed": []}, "number=1 .* does not follow None"),
        ("pages", {"engine": 0, "number": 6, "published": ["ab"], "removed": []}, "published must be a list of hashes"),
        ("pages", {"engine": 0, "number": 6, "published": ["x" * 64], "removed": []}, "non-hexadecimal"),
        ("pages", {"engine": 0, "number": 6, "published": [], "removed": None}, "removed must be a list of hashes"),
        ("snapshot", {"engine": True, "number": 6, "hashes": []}, "engine must be a whole number"),
        ("snapshot", {"engine": 1 << 40, "number": 6, "hashes": []}, "engine must be a whole number from 0 to 1,024"),
        ("load", {"engine": 0, "queued_tokens": -1, "has_room": True, "is_draining": False}, "queued_tokens must be"),
        ("load", {"engine": 0, "queued_tokens": 1, "has_room": 1, "is_draining": False}, "has_room must be true or"),
        ("load", {}, "engine must be a whole number"),
    ],
)
def test_what_no_server_sends_is_refused(kind, data, message):
    feed = fed(Router())
    with pytest.raises(ValueError, match=message):
        feed.take(kind, data)


def test_the_documented_example_says_what_it_says():
    text = (Path(__file__).parents[2] / "docs/replicas.md").read_text()
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ReplicaFeed" in code]
    names = {"pods": ["pod-a", "pod-b"], "token_ids": list(range(100))}
    exec(compile(code, "docs/replicas.md", "exec"), names)
    assert repr(tuple(names["choice"]))[1:-1].replace("'", '"') in code
