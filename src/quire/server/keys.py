"""API keys, kept as hashes and compared in constant time, and what is known of the client that each one stands for.

A key file has one key a line, with fields after it:

    KEY [name=alice] [weight=2] [requests=8] [queued_tokens=100000] [tokens_per_minute=60000]   # comment

KEY is printable ASCII without spaces, in the clear or as `sha256:<64 hex digits>`. The hash of a key also salts its
prefixes in the cache, so that one client cannot find out the prompts of another.
"""

import contextlib
import copy
import hashlib
import hmac
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.async_llm.admission import NO_LIMITS, Limits
from quire.server.config import ServerConfig

MIN_KEY_LEN = 8
MAX_WEIGHT = 1000
MAX_LIMIT = 1 << 40
LIMITS = Limits._fields
FIELDS = ("name", "weight", *LIMITS)
"""Fields that may follow a key in a file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELD = re.compile(r"([a-z_]{1,32})=(.*)")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")

_log = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class Caller:
    """A client of the server, known by its key."""

    tenant: str = ""
    """Identifier of the key that reveals nothing about it. Empty on a server without keys."""
    name: str = ""
    """Label of the key in logs, metrics and errors. Two keys may have the same. Empty on a server without keys."""
    weight: int = 1
    """Share of the engine relative to other callers, when all of them have requests waiting."""
    limits: Limits = NO_LIMITS
    request_id: str = ""
    """Identifier of the one request that this caller makes. Empty for lines of batches, which have their own."""

    def salt(self, cache_salt: str) -> str:
        """Return the salt of the caller's prefixes in the cache; no other caller has it, whatever salt it sends."""
        if not self.tenant and not cache_salt:
            return ""
        return hashlib.sha256(f"{self.tenant}\0{cache_salt}".encode()).hexdigest()


class Keys:
    """The keys that a server accepts."""

    def __init__(
        self,
        given: Iterable[str] = (),
        file: Path | None = None,
        *,
        flag: str = "--api-key",
        limits: Limits = NO_LIMITS,
        fields: tuple[str, ...] = FIELDS,
    ) -> None:
        """Read keys from the command line or the environment, and from a file. ValueError if one is wrong.

        `flag` is the name of their option in errors; `limits` apply where a line of the file sets none; `fields` are
        the names that lines may set.
        """
        self._given = {key: _caller_of(key, limits) for key in (_hash_of(flag, one) for one in given)}
        self._file = file
        self._flag = flag
        self._fields = fields
        self.everyone = Caller(limits=limits)
        """All clients of a server without keys, as one caller."""
        self._callers: dict[bytes, Caller] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. If it is wrong, raise ValueError and keep the keys that were read before."""
        self._callers = self._given | (self._read_file(self._file) if self._file else {})
        self._tenants = {caller.tenant: caller for caller in self.callers}

    def reread(self) -> "Keys":
        """Return the keys with what their file has now. ValueError if it is wrong."""
        keys = copy.copy(self)
        keys.reload()
        return keys

    def become(self, other: "Keys") -> None:
        """Accept the keys of `other` from now on."""
        self._callers, self._tenants = other._callers, other._tenants

    @property
    def has_file(self) -> bool:
        """True if `reload` may read other keys."""
        return self._file is not None

    def report_exposed_file(self) -> None:
        """Log a warning if every user of this machine can read the file."""
        with contextlib.suppress(OSError):
            if self._file and self._file.stat().st_mode & 0o004:
                name = self._file.name
                text = f"{self._flag}-file {name} can be read by every user of this machine"
                _log.warning("%s: take the right from them (chmod o=)", text)

    def __len__(self) -> int:
        return len(self._callers)

    def overlaps(self, other: "Keys") -> bool:
        """Return True if a key is in both."""
        return not self._callers.keys().isdisjoint(other._callers)

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key, or None if the key is not valid.

        Every key is compared, whichever fits: the time it takes reveals nothing.
        """
        found, hashed = None, hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        for good, caller in self._callers.items():
            if hmac.compare_digest(good, hashed):
                found = caller
        return found

    def find_bearer(self, authorization: str) -> Caller | None:
        """Return the caller of an `Authorization` header, `Bearer KEY`, or None if its key is not valid."""
        scheme, _, key = authorization.partition(" ")
        return self.find(key.strip()) if scheme.lower() == "bearer" else None

    def find_tenant(self, tenant: str) -> Caller | None:
        """Return the caller of a tenant, or None if its key is not valid any more."""
        return self._tenants.get(tenant)

    @property
    def callers(self) -> list[Caller]:
        """Callers of all keys, or the only one of a server without keys."""
        return list(self._callers.values()) or [self.everyone]

    @property
    def weights(self) -> dict[str, int]:
        """Weight of each caller, by tenant."""
        return {caller.tenant: caller.weight for caller in self.callers}

    def _read_file(self, file: Path) -> dict[bytes, Caller]:
        where = f"{self._flag}-file {file.name}"
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:  # its message has the whole path
            raise ValueError(f"{where} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{where} cannot be read: it is not UTF-8") from None
        callers: dict[bytes, Caller] = {}
        lines: dict[bytes, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = re.sub(r"(^|\s)#.*", "", line).split()
            if not words:
                continue
            key = _hash_of(f"{file.name}, line {number}", words[0])
            if key in callers:
                raise ValueError(f"{file.name}, line {number}: the key of line {lines[key]} again; remove one of them")
            lines[key] = number
            callers[key] = self._read_fields(f"{file.name}, line {number}", words[1:], key)
        if not callers:
            raise ValueError(f"{where} holds no key; write one per line")
        return callers

    def _read_fields(self, where: str, words: list[str], key: bytes) -> Caller:
        """Return the caller that a line describes. Errors quote known field names only: other words may be secret."""
        caller, limits, seen = _caller_of(key, self.everyone.limits), {}, set()
        for i, word in enumerate(words, 2):
            match = _FIELD.fullmatch(word)
            if match is None or match[1] not in self._fields:
                what = f"word {i} is not FIELD=VALUE with a known field"
                raise ValueError(f"{where}: {what}; after the key, use {', '.join(self._fields)}")
            name, value = match.groups()
            if name in seen:
                raise ValueError(f"{where}: {name} is set twice; remove one of them")
            seen.add(name)
            if name == "name":
                if not _NAME.fullmatch(value):
                    raise ValueError(f"{where}: name={value!r}; use 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
                caller = replace(caller, name=value)
            elif name == "weight":
                caller = replace(caller, weight=_whole(where, name, value, MAX_WEIGHT))
            else:
                limits[name] = _whole(where, name, value, MAX_LIMIT)
        return replace(caller, limits=caller.limits._replace(**limits))


def key_limits(config: ServerConfig) -> Limits:
    """Return the limits of a key whose line in a file sets none."""
    given = (config.max_key_requests, config.max_key_queued_tokens, config.max_key_tokens_per_minute)
    return Limits(*(math.inf if limit is None else limit for limit in given))


def _caller_of(key: bytes, limits: Limits) -> Caller:
    tenant = hashlib.sha256(b"quire tenant" + key).hexdigest()[:32]
    return Caller(tenant, f"key-{tenant[:8]}", limits=limits)


def _whole(where: str, name: str, value: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,13}", value) or not 1 <= int(value) <= most:
        raise ValueError(f"{where}: {name}={value[:40]} must be a whole number from 1 to {most:,}")
    return int(value)


def _hash_of(where: str, key: str) -> bytes:
    if hashed := _HASH.fullmatch(key):
        return bytes.fromhex(hashed[1])
    if len(key) < MIN_KEY_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where}: a key must be at least {MIN_KEY_LEN} printable ASCII characters without spaces")
    return hashlib.sha256(key.encode()).digest()
