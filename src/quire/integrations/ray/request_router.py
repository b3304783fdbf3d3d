"""Serve's request router for engines: to where the prompt's beginning is cached, as far as load allows.

Replicas report the names of their cached pages and their load (`EngineReplica.record_routing_stats`); the policy is
`quire.routing.Router`. Reports are a second old or more: what was sent since the one before the last counts as cached.
"""

# pyright: reportMissingImports=false

import asyncio
import itertools
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.integrations.ray.forwarded import NAME_BYTES, ForwardedRequest
from quire.routing import Load, Router
from quire.routing.router import MAX_IMBALANCE_TOKENS

IDLE_S = 0.01


class PrefixRouter(FIFOMixin, RequestRouter):
    """Chooses a replica by what is cached there. Serve makes one in each process that calls the engines."""

    def initialize_state(self, max_imbalance_tokens: int = MAX_IMBALANCE_TOKENS) -> None:
        """Called by Serve with `request_router_kwargs`."""
        self._policy = Router(max_imbalance_tokens=max_imbalance_tokens)
        self._reports: dict[str, Any] = {}
        self._sent: dict[str, list[dict[bytes, None]]] = {}
        """Names of the pages of what was sent to each replica, since its last report and since the one before."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to ask first, then the others, which Serve falls back to."""
        for replica in candidate_replicas:
            self._hear(replica)
        if pending_request is None:  # a task of Serve's without a request places the oldest that has no replica yet
            await asyncio.sleep(IDLE_S)  # another task is usually about to
            waiting = self._pending_requests_to_fulfill
            pending_request = next((one for one in waiting if not one.future.done()), None)
        request = _request_of(pending_request)
        if pending_request is None or request is None:
            return [candidate_replicas]
        context = pending_request.routing_context
        num_tokens = 0 if context.should_backoff else request.num_tokens  # counted once, however often it is tried
        context.should_backoff = True  # else Serve tries again without a pause
        choice = self._policy.choose(request.page_names, num_tokens=num_tokens)
        if choice is None:
            return [candidate_replicas]
        first = [replica for replica in candidate_replicas if _name(replica.replica_id) == choice.engine]
        return [first, [replica for replica in candidate_replicas if replica not in first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica will have the pages of what it is sent."""
        name, request = _name(replica_id), _request_of(pending_request)
        if request and name in self._sent:
            self._sent[name][0].update(dict.fromkeys(request.page_names))
            self._policy.pages.add(name, request.page_names)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone."""
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """These are the replicas from now on."""
        super().update_replicas(replicas)
        for name in self._reports.keys() - {_name(replica.replica_id) for replica in replicas}:
            self._forget(name)

    # Serve's router ends a task when there are more of them than requests without a replica, and forgets the request
    # that the task was to place. So any task may place any request, FIFOMixin's way, and tasks end as soon as they can.

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """The request that a replica was chosen for; if it has one, FIFOMixin takes the oldest that has none."""
        return self._get_pending_request_matching_internal_request_id(request_metadata)

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give a request its replica; what has one counts as waiting no more."""
        super()._fulfill_next_pending_request(replica, request_metadata)
        waiting = self._pending_requests_to_fulfill
        while waiting and waiting[0].future.done():
            waiting.popleft()

    def _hear(self, replica: RunningReplica) -> None:
        """Tell the policy what a replica has reported, once for each report."""
        name, report = _name(replica.replica_id), replica.routing_stats
        if self._reports.get(name) is report:
            return
        self._reports[name] = report
        is_ready, has_room = report.get("is_ready", True), report.get("has_room", True)
        self._policy.report(name, Load(report.get("queued_tokens", 0), has_room, not is_ready))
        if "num_requests" in report:  # spares Serve to ask for it before it sends
            self.on_new_queue_len_info(replica.replica_id, report["num_requests"])
        pages = report.get("pages", b"")
        sent = self._sent[name] = [{}, *self._sent.get(name, [])[:1]]
        self._policy.pages.clear(name)
        self._policy.pages.add(name, list(itertools.chain(*sent)))
        self._policy.pages.add(name, [pages[i : i + NAME_BYTES] for i in range(0, len(pages), NAME_BYTES)])

    def _forget(self, name: str) -> None:
        self._policy.forget(name)
        self._reports.pop(name, None)
        self._sent.pop(name, None)


def _name(replica_id: ReplicaID) -> str:
    return replica_id.to_full_id_str()


def _request_of(pending_request: PendingRequest | None) -> ForwardedRequest | None:
    args = pending_request.args if pending_request else ()
    return args[0] if args and isinstance(args[0], ForwardedRequest) else None
