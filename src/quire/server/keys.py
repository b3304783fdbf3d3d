"""API keys, kept as hashes and compared in constant time.

A key is any secret text; a file has one a line, in the clear or as `sha256:<64 hex digits>`. The hash of a key also
salts its prefixes in the cache, so that one client cannot find out the prompts of another.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

MIN_KEY_LEN = 8
_HASH = re.compile(r"sha256:([0-9a-f]{64})")


class Keys:
    """The keys that a server accepts."""

    def __init__(self, hashes: Iterable[bytes]) -> None:
        self._hashes = tuple(dict.fromkeys(hashes))

    @classmethod
    def read(cls, *, given: Iterable[str] = (), file: Path | None = None, flag: str = "--api-key") -> "Keys":
        """Keys from the command line or the environment, and from a file; `flag` is how errors call them."""
        lines = [(flag, key) for key in given]
        if file is not None:
            try:
                text = file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{flag}-file {file.name} cannot be read: {error}") from None
            entries = [line.strip() for line in text.splitlines()]
            lines += [(f"{file.name}, line {i + 1}", entry) for i, entry in enumerate(entries) if entry]
            if not any(entries):
                raise ValueError(f"{flag}-file {file.name} holds no key; write one a line")
        return cls(_hash_of(where, key) for where, key in lines)

    def __len__(self) -> int:
        return len(self._hashes)

    def overlaps(self, other: "Keys") -> bool:
        """Whether a key is in both."""
        return not set(self._hashes).isdisjoint(other._hashes)

    def find(self, key: str) -> str | None:
        """The tenant a key stands for: a name that tells nothing about it. None if it is not valid.

        Every key is compared, whichever fits: time tells nothing.
        """
        found, hashed = None, hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for good in self._hashes:
            if hmac.compare_digest(good, hashed):
                found = good
        return None if found is None else _tenant_of(found)

    @property
    def tenants(self) -> list[str]:
        """The tenants of all keys; one without a name where there are no keys."""
        return [_tenant_of(hashed) for hashed in self._hashes] or [""]

    def find_bearer(self, authorization: str) -> str | None:
        """The tenant of an `Authorization` header, `Bearer KEY`; None if its key is not valid."""
        scheme, _, key = authorization.partition(" ")
        return self.find(key.strip()) if scheme.lower() == "bearer" else None


def _tenant_of(hashed: bytes) -> str:
    return hashlib.sha256(b"quire tenant" + hashed).hexdigest()[:32]


def _hash_of(where: str, key: str) -> bytes:
    if hashed := _HASH.fullmatch(key):
        return bytes.fromhex(hashed[1])
    if len(key) < MIN_KEY_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where}: a key must be at least {MIN_KEY_LEN} printable ASCII characters without spaces")
    return hashlib.sha256(key.encode()).digest()
