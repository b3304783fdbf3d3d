"""Bounds the queue, and what each client may have of it: requests are counted when they arrive.

A request waits from its arrival until its first sequence has a row. How many may wait, and how many tokens they may ask
for together, is bounded; beyond that a client gets a time to try again, when those that now wait will have begun, as
far as the time that the last ones kept their rows tells.

When the queue is full, a client is refused only if it has more than its share: the queue divided by the clients that
wait. What a client may have at all is bounded by `Limits`; tokens per minute are counted at arrival, as many as there
may be, and what was not computed is counted back at the end.
"""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from quire.async_llm.errors import OverloadError
from quire.core.errors import RequestError

LONGEST_RETRY_S = 120
"""What clients of OpenAI obey at most."""
RECENT = 64
"""Requests that have ended and are remembered: how long they ran tells how long the next ones will."""


class Limits(NamedTuple):
    """Limits of one client; the defaults are none."""

    requests: float = math.inf
    """Requests that may wait and run at once."""
    queued_tokens: float = math.inf
    """Tokens, of prompts and of what may be generated, that its waiting requests may have together."""
    tokens_per_minute: float = math.inf
    """Tokens of prompts and of what is generated."""


NO_LIMITS = Limits()


class Client(Protocol):
    """What is known of a client, whose requests have one tenant."""

    @property
    def name(self) -> str:
        """Label for errors; empty if all clients are one."""
        ...

    @property
    def limits(self) -> Limits:
        """What the client may have."""
        ...


class _Anyone(NamedTuple):
    name: str = ""
    limits: Limits = NO_LIMITS


class Work(NamedTuple):
    """The work of one request of the engine."""

    request_id: str
    num_sequences: int
    num_tokens: int
    """Of the prompt and of all sequences, at most."""
    tenant: str = ""


class _Counted(NamedTuple):
    work: Work
    since: float
    """When it arrived, or began to run."""


class _Account:
    """What one tenant has under way, and the tokens that it has left of this minute."""

    def __init__(self, tokens_left: float, now: float) -> None:
        self.num_waiting = self.num_running = self.num_waiting_tokens = 0
        self._tokens_left = tokens_left
        self._refilled_at = now

    def tokens_left(self, limit: float, now: float) -> float:
        """Tokens left of a limit per minute. They come back evenly, and are negative after one request beyond it."""
        self._tokens_left = min(limit, self._tokens_left + (now - self._refilled_at) * limit / 60)
        self._refilled_at = now
        return self._tokens_left

    def take_tokens(self, num_tokens: float) -> None:
        """Count tokens that may be computed; a negative number counts them back."""
        self._tokens_left -= num_tokens


class Admission:
    """Counts the requests that wait and run, and refuses those beyond the limits. For one thread at a time."""

    def __init__(
        self,
        *,
        max_requests: float = math.inf,
        max_tokens: float = math.inf,
        num_rows: int = 1,
        find_client: Callable[[str], Client | None] = lambda tenant: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find_client` returns the client of a tenant, or None if it has no limits."""
        self.max_requests = max_requests
        """Requests that may wait."""
        self.max_tokens = max_tokens
        """Tokens that the requests which wait may come to together."""
        self.num_rows = num_rows
        """Sequences that run at once: as long as some are free, no request is refused for the length of the queue."""
        self._find_client = find_client
        self._clock = clock
        self._waiting: dict[str, _Counted] = {}  # the oldest first
        self._running: dict[str, _Counted] = {}
        self._accounts: dict[str, _Account] = {}
        self._num_tokens = self._num_sequences = 0
        self._seconds_run: deque[float] = deque(maxlen=RECENT)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests may come to, prompts and generated ones."""
        return self._num_tokens

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have requests under way, or fewer tokens left than all of a minute."""
        return len(self._accounts)

    def check_room(self, tenant: str = "") -> None:
        """Raise OverloadError if not even an empty request would be taken; called before a prompt is encoded."""
        account = self._account(tenant)
        self._check_limits(tenant, account, 1, 0, is_queued=False)
        if self._num_sequences >= self.num_rows:
            self._check_queue(account, 1, 0)

    @contextlib.contextmanager
    def hold(self, tenant: str) -> Iterator[None]:
        """Count work that needs no row as one running request of its client, or raise OverloadError."""
        self.check_room(tenant)
        account = self._accounts[tenant] = self._account(tenant)
        account.num_running += 1
        try:
            yield
        finally:
            account.num_running -= 1
            self._forget_if_idle(tenant, account)

    @property
    def room(self) -> float:
        """How many requests of one sequence would be taken now, if they are short."""
        return max(self.num_rows - self._num_sequences, self.max_requests - len(self._waiting), 0)

    def room_for(self, tenant: str) -> float:
        """How many requests of one sequence a tenant may add now, if they are short."""
        account, limit = self._account(tenant), self._client(tenant).limits.requests
        return max(min(self.room, limit - account.num_waiting - account.num_running), 0)

    def leaves_half(self, tenant: str) -> bool:
        """True if a tenant may add a request in the background and leave half of its own limits to its other requests.

        A limit of one request cannot be halved: then it is true if the tenant has no request under way.
        """
        account, limits = self._account(tenant), self._client(tenant).limits
        if account.num_waiting + account.num_running >= max(limits.requests / 2, 1):
            return False
        if account.num_waiting_tokens > limits.queued_tokens / 2:
            return False
        per_minute = limits.tokens_per_minute
        return per_minute == math.inf or account.tokens_left(per_minute, self._clock()) > per_minute / 2

    def arrive(self, works: Sequence[Work], *, is_admitted: bool = False, in_turns: bool = False) -> None:
        """Count the requests that a client makes at once, or raise OverloadError; RequestError if it is always refused.

        Those that are admitted follow earlier ones of the same client that have ended, and are not refused. Those that
        take turns are the first of more: as they were divided by the room that there is, they are not always refused.
        """
        if not works:
            return
        tenant, num_tokens = works[0].tenant, sum(work.num_tokens for work in works)
        account, num_sequences = self._account(tenant), sum(work.num_sequences for work in works)
        if not is_admitted:
            is_queued = self._num_sequences + num_sequences > self.num_rows
            if not in_turns:
                self._check_size(tenant, works, num_tokens, is_queued=num_sequences > self.num_rows)
            self._check_limits(tenant, account, len(works), num_tokens, is_queued=is_queued)
            if is_queued:
                self._check_queue(account, len(works), num_tokens)
        self._accounts[tenant] = account
        for work in works:
            self._waiting[work.request_id] = _Counted(work, self._clock())
        self._num_sequences += num_sequences
        self._num_tokens += num_tokens
        account.num_waiting += len(works)
        account.num_waiting_tokens += num_tokens
        account.take_tokens(num_tokens)

    def start(self, request_id: str) -> None:
        """A request has a row."""
        work = self._end_wait(request_id)
        if work:
            self._running[request_id] = _Counted(work, self._clock())
            self._account(work.tenant).num_running += 1

    def leave(self, request_id: str, num_computed: int = 0) -> None:
        """A request has ended with so many tokens of its prompt and its sequences, or without ever having had a row."""
        if request_id in self._running:
            work, since = self._running.pop(request_id)
            self._seconds_run.append(self._clock() - since)
            self._account(work.tenant).num_running -= 1
        else:
            work, num_computed = self._end_wait(request_id), 0
        if work:
            self._num_sequences -= work.num_sequences
            account = self._account(work.tenant)
            account.take_tokens(num_computed - work.num_tokens)
            self._forget_if_idle(work.tenant, account)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until those that wait now will have begun, if they run as long as the last ones did."""
        seconds = 0.0
        if self._running:
            seconds = self._seconds_of_a_row * len(self._waiting) / len(self._running)
        elif self._waiting:
            seconds = self._clock() - next(iter(self._waiting.values())).since  # at least as long again
        return _whole_seconds(seconds)

    @property
    def _seconds_of_a_row(self) -> float:
        """Seconds that a request runs. Those that run now may already have run for longer than those that ended."""
        now = self._clock()
        runs = [self._seconds_run, [now - running.since for running in self._running.values()]]
        return max((statistics.fmean(run) for run in runs if run), default=0.0)

    # -- refusing -----------------------------------------------------------------------------------------------------

    def _check_size(self, tenant: str, works: Sequence[Work], num_tokens: int, *, is_queued: bool) -> None:
        """Raise RequestError if several requests at once are more than their client may ever have.

        A single one that is larger than a limit on tokens waits alone instead: it cannot be divided.
        """
        client = self._client(tenant)
        limits = client.limits
        found = [(len(works), limits.requests, "requests", _who(client))]
        if is_queued:
            found += [(len(works), self.max_requests, "--max-queued-requests", "this server")]
            found += [(num_tokens, limits.queued_tokens, "queued_tokens", _who(client))]
            found += [(num_tokens, self.max_tokens, "--max-queued-tokens", "this server")]
        found += [(num_tokens, limits.tokens_per_minute, "tokens_per_minute", _who(client))]
        for count, most, name, who in found:
            if len(works) > 1 and count > most:
                message = (
                    f"{len(works)} prompts may come to {num_tokens:,} tokens, and the limit of {who} is "
                    f"{name}={most:,.0f}; send fewer prompts at once, or lower n or max_tokens"
                )
                raise RequestError(message, field="prompt", code="request_too_large")

    def _check_limits(
        self, tenant: str, account: _Account, num_requests: int, num_tokens: int, *, is_queued: bool
    ) -> None:
        """Raise OverloadError if a client would have more than its limits."""
        client = self._client(tenant)
        limits, under_way = client.limits, account.num_waiting + account.num_running
        if under_way + num_requests > limits.requests:
            seconds = self._seconds_of_a_row / max(account.num_running, 1)
            message = f"{under_way} requests wait or run, and at most requests={limits.requests:,} may"
            self._reject(f"{_who(client)}: {message}", "key_requests", _whole_seconds(seconds))
        if is_queued and account.num_waiting and account.num_waiting_tokens + num_tokens > limits.queued_tokens:
            message = (
                f"{account.num_waiting_tokens:,} tokens wait and this may come to {num_tokens:,} more; at most "
                f"queued_tokens={limits.queued_tokens:,} may"
            )
            self._reject(f"{_who(client)}: {message}", "key_queued_tokens", self.retry_after_s)
        if (limit := limits.tokens_per_minute) < math.inf:
            left = account.tokens_left(limit, self._clock())
            needed = min(max(num_tokens, 1), limit)  # what is larger than the limit needs all of a minute
            if left < needed:
                are_left = f"{max(left, 0):,.0f} of tokens_per_minute={limit:,} are left"
                wait = "; it runs once a whole minute's tokens are left" if num_tokens > limit else ""
                message = f"{are_left} and this may need {num_tokens:,}{wait}"
                seconds = (needed - left) * 60 / limit
                self._reject(f"{_who(client)}: {message}", "key_tokens_per_minute", _whole_seconds(seconds))

    def _check_queue(self, account: _Account, num_requests: int, num_tokens: int) -> None:
        """Raise OverloadError if the queue is full and the client has its share of it.

        A client with nothing in the queue may wait beyond the limits, until twice as many requests or tokens wait as
        may: there may be more clients than the queue has places.
        """
        num_waiting, num_waiting_tokens = len(self._waiting), self._num_tokens
        is_twice_full = num_waiting >= 2 * self.max_requests or num_waiting_tokens >= 2 * self.max_tokens
        if not account.num_waiting and not is_twice_full:
            return
        num_tenants = max(sum(one.num_waiting > 0 for one in tuple(self._accounts.values())), 1)  # threads may add some
        if num_waiting + num_requests > self.max_requests and (
            num_waiting + num_requests > 2 * self.max_requests
            or account.num_waiting + num_requests > self.max_requests / num_tenants
        ):
            message = f"{num_waiting} requests wait, at most {self.max_requests} may"
            self._reject(f"the engine is busy: {message}", reason="max_queued_requests")
        if num_waiting_tokens + num_tokens > self.max_tokens and (
            num_waiting_tokens >= 2 * self.max_tokens
            or account.num_waiting_tokens + num_tokens > self.max_tokens / num_tenants
        ):
            self._reject(
                f"the engine is busy: {self._num_tokens:,} tokens wait and this may come to {num_tokens:,} more; at "
                f"most {self.max_tokens:,} may wait",
                reason="max_queued_tokens",
            )

    def _reject(
        self, message: str, code: str = "overloaded", retry_after_s: int | None = None, *, reason: str | None = None
    ) -> None:
        seconds = self.retry_after_s if retry_after_s is None else retry_after_s
        raise OverloadError(message, seconds, code, reason=reason)

    def _account(self, tenant: str) -> _Account:
        """Return the account of a tenant, or a new one, which is not kept yet."""
        limit = self._client(tenant).limits.tokens_per_minute
        return self._accounts.get(tenant) or _Account(limit, self._clock())

    def _forget_if_idle(self, tenant: str, account: _Account) -> None:
        """Drop an account without requests and with all tokens of a minute: a new one is the same."""
        limit = self._client(tenant).limits.tokens_per_minute
        is_idle = not account.num_waiting and not account.num_running
        if is_idle and (limit == math.inf or account.tokens_left(limit, self._clock()) >= limit):
            self._accounts.pop(tenant, None)

    def _client(self, tenant: str) -> Client:
        return self._find_client(tenant) or _Anyone()

    def _end_wait(self, request_id: str) -> Work | None:
        if request_id not in self._waiting:
            return None
        work = self._waiting.pop(request_id).work
        account = self._account(work.tenant)
        account.num_waiting -= 1
        account.num_waiting_tokens -= work.num_tokens
        self._num_tokens -= work.num_tokens
        return work


def _who(client: Client) -> str:
    return f"key {client.name}" if client.name else "all clients"


def _whole_seconds(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), LONGEST_RETRY_S)
