"""Who runs next.

Continuous batching over pools of pages: each step gives every decoding sequence its one token, spends the rest of the
token budget on prompts in chunks, and mixes both. Order is priority, then arrival, then index in the family; nothing
overtakes. Pages are reserved before the step that writes them; when a pool has none left the last in order gives its
pages back: to host memory, or to be recomputed. `commit` is the only judge of what a step produced.

A request for n sequences computes its prompt once: the first sequence leads, the others wait for it until they have
drawn their first token from its logits; then they queue for rows of their own, where they share its pages.

Costs are linear in what runs and independent of what waits and of the pool's size. Refuses to know: tensors, text.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import chain
from operator import add

from quire.core.commit import accept_pooled, accept_scores, accept_tokens, computed_end, has_finite_results
from quire.core.draft_kv import DraftKV
from quire.core.draft_pages import DraftPages
from quire.core.drafts import FIRST_DRAFTS, UNKNOWN, Drafter, Guesses
from quire.core.forks import fork_of
from quire.core.page_tables import PageCounts, PageTables
from quire.core.plan import Row, StepPlan, StepResult
from quire.core.planner import Planner, add_drafts, most_unseen, reserve_rounds
from quire.core.preemption import PRICE, Limits, PreemptionCosts, choose_victims, place, prefers_swap
from quire.core.sequence import Sequence, SequenceState, TokenEvent, Version, Weights
from quire.core.stopping import FinishReason
from quire.core.tenants import Tenant, Tenants
from quire.core.waiting import WaitingQueue

WATCHED_ROUNDS = 4
"""Rounds in one dispatch, at most, when somebody watches a stream or waits: for a place, or for the host."""


class Scheduler:
    """Owns the queue, the running list and, through `tables`, every page."""

    def __init__(
        self,
        tables: PageTables,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_samples: int | None = None,
        max_rounds: int = 1,
        drafts: int = 0,
        draft_len: int = 0,
        preemption: str = "auto",
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens=} must be at least {max_num_seqs=}")
        self.tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_samples = max_num_seqs if max_num_samples is None else max_num_samples
        self.max_rounds = max_rounds
        self.drafts = drafts
        """Tokens of a step that decodes, at most, when it guesses ahead; 0 for never."""
        self.draft_kv: DraftKV | None = None
        """What the draft model has computed; None where there is none, and drafts are looked up."""
        if draft_len:
            pages = DraftPages(tables.pool.num_pages, tables.pool.num_host_pages, tables.page_size)
            self.draft_kv = DraftKV(pages, max_len=draft_len, max_tokens=max_num_batched_tokens)
        self.preemption = preemption
        self.costs = PreemptionCosts()
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        """Sequences without a row, waiting or swapped."""
        self.running: list[Sequence] = []
        """In order of tenants by their clocks, then of each tenant; the last one is the first to be preempted."""
        self.waiting_for_prompt: dict[str, list[Sequence]] = {}
        """Request id -> sequences that wait for the first of their family to compute the prompt."""
        self.num_recomputes = 0
        self.num_swaps = 0
        self.cached_tokens = 0
        """Positions found in the prefix cache or with a relative instead of computed."""
        self.drafted_tokens = 0
        self.accepted_drafts = 0
        """Drafted tokens that were drawn."""
        self.in_flight: StepPlan | None = None

    @property
    def num_preemptions(self) -> int:
        """How often a running sequence lost its pages."""
        return self.num_recomputes + self.num_swaps

    @property
    def num_waiting(self) -> int:
        """Sequences without a row, those that wait for a prompt too."""
        return len(self.waiting) + sum(map(len, self.waiting_for_prompt.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue the first sequence of a family; the others wait for it to compute the prompt."""
        self.tables.check_fits(sequence.request.id, sequence.prompt_len, sequence.max_tokens)
        self.waiting.push(sequence)
        if len(sequence.family) > 1:
            self.waiting_for_prompt[sequence.request.id] = sequence.family[1:]

    def fork(self, sequence: Sequence, changed: Sequence | None = None, token_ids: SequenceOf[int] = ()) -> Sequence:
        """Queue another sequence that goes on from the tokens this one has, and from those forced behind them.

        `changed` is a sequence without tokens that has the parameters of the new one; None for the same parameters.
        """
        child = fork_of(sequence, changed, token_ids, self.tables.weights.version)
        child.join_family()
        self.waiting.push(child)
        return child

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence now, whatever it is doing; its pages are back when this returns. False if it had ended.

        Safe while a step is in flight: no page is handed out again before that step is committed.
        """
        if sequence.state is SequenceState.FINISHED:
            return False
        was_running = sequence.state is SequenceState.RUNNING
        self._finish(sequence, FinishReason.ABORT)
        waiting_for_prompt = self.waiting_for_prompt.get(sequence.request.id, [])
        if sequence in waiting_for_prompt:
            waiting_for_prompt.remove(sequence)
        else:
            if was_running:
                self.running.remove(sequence)
            else:
                self.waiting.discard(sequence)
            if waiting_for_prompt:
                self.waiting.push(waiting_for_prompt.pop(0))  # somebody else of the family has to compute the prompt
        if not waiting_for_prompt:
            self.waiting_for_prompt.pop(sequence.request.id, None)
        return True

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share rows and tokens in proportion to these from now on; a tenant that is not named has the weight 1."""
        self.tenants.set_weights(weights)

    def reset(self) -> int:
        """Abort everything and say how many that were. Costs what lives, never what the pool could hold."""
        waiting = list(self.waiting)
        aborted = [*self.running, *waiting, *chain.from_iterable(self.waiting_for_prompt.values())]
        for sequence in aborted:
            self._finish(sequence, FinishReason.ABORT)
        for sequence in waiting:
            self.waiting.discard(sequence)
        self.running = []
        self.waiting_for_prompt = {}
        self.in_flight = None
        return len(aborted)

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve its pages."""
        if self.in_flight is not None:
            raise RuntimeError("the last plan is not committed; commit(N) comes before schedule(N+1)")
        self._order_running()
        self._make_room_for_head()
        planner = Planner(self.max_num_batched_tokens, self.max_num_samples, self.running)
        if self._plan_running(planner) and self.waiting and len(self.running) < self.max_num_seqs:
            promised = self.tables.num_promised(self.running)
            while self._admit_head(planner, promised):
                promised = list(map(add, promised, self.tables.num_promised(planner.started[-1:])))
        plan = planner.plan
        if plan:
            if self.draft_kv is not None:
                self.draft_kv.move(self.tables.pool.operations)
                if self._share(plan) >= FIRST_DRAFTS:
                    self.draft_kv.follow(plan)
            if (self.max_rounds > 1 or self.drafts) and plan.can_go_on:
                self._draft(plan)
                if not plan.drafts:
                    self._reserve_ahead(plan)
            plan.operations = self.tables.take_operations()
            self.in_flight = plan
        return plan

    def _plan_running(self, planner: Planner) -> bool:
        """Give every running sequence its share, in order, and let the head of the queue in where its place is.

        False if somebody had to be preempted. Nobody is after somebody got in: the pages that all who run need for
        the tokens they have were promised to them.
        """
        preemptions_before = self.num_preemptions
        running, page_size = self.running, self.tables.page_size
        head_position, position = self._head_position(), 0
        while position < len(running):
            sequence = running[position]
            if head_position is not None and head_position <= position:
                got_in = self._admit_head(planner, self.tables.num_promised(running))
                head_position = self._head_position() if got_in else None
                position = running.index(sequence)  # behind whoever got in
                continue
            computed = sequence.num_computed
            is_decoding = computed >= sequence.prompt_len and sequence.num_tokens == computed + 1
            num_tokens = 1 if is_decoding else planner.claim(sequence)
            end = computed + num_tokens
            if end > len(sequence.pages) * page_size and not self._reserve(sequence, end):
                break  # it gave up its own place, and everybody after it had done so before
            if is_decoding:
                planner.add_decoding(sequence)
            elif num_tokens:
                planner.add(sequence, num_tokens, self.waiting_for_prompt.get(sequence.request.id, ()))
            position += 1
        return self.num_preemptions == preemptions_before

    def _head_position(self) -> int | None:
        """Where the head of the queue would come in the running list; None if nothing waits."""
        head = self.waiting.peek()
        return None if head is None else bisect_left(self.running, place(head), key=place)

    def _admit_head(self, planner: Planner, promised: PageCounts) -> bool:
        """Start the head of the queue if a row, tokens and pages are there, beside those promised to who runs.

        It is never overtaken.
        """
        head, tables = self.waiting.peek(), self.tables
        if head is None or len(self.running) >= self.max_num_seqs:
            return False
        prefix = tables.find_prefix(head, unwritten=planner.started)
        num_tokens = planner.share(head, prefix.num_tokens)
        if num_tokens == 0 or not tables.has_room(map(add, tables.num_new(head, prefix), promised)):
            return False
        self.waiting.pop()
        if head.state is SequenceState.WAITING:
            self.cached_tokens += prefix.num_tokens
            if not head.preemptions:
                head.num_cached_tokens = prefix.num_tokens
        tables.start(head, prefix)
        head.move_to(SequenceState.RUNNING)
        insort(self.running, head, key=place)
        tables.grow(head, head.num_computed + num_tokens)
        self.tenants.advance(head.charge(prefix.num_tokens, head.num_computed + num_tokens))
        planner.started.append(head)
        planner.add(head, num_tokens, self.waiting_for_prompt.get(head.request.id, ()))
        return True

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Give a sequence pages for positions below `end`, preempting from the back. False if it went itself."""
        missing = self.tables.pages_for(end) - len(sequence.pages)
        while missing > self.tables.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        self.tables.grow(sequence, end)
        return True

    def _draft(self, plan: StepPlan) -> None:
        """Fill a plan that only decodes up to `drafts` tokens with what its sequences may go on with.

        Each has the same share. Where that is less than a drafter begins with, there are too many rows for it to pay.
        """
        share, found = self._share(plan), {}
        for i, row in enumerate(plan.rows if share >= FIRST_DRAFTS else ()):
            sequence = row.sequence
            if sequence.drafter is None:
                sequence.drafter = Guesses() if self.draft_kv else Drafter(sequence.num_tokens)
            drafter = sequence.drafter
            most = min(share, drafter.most, most_unseen(sequence) - 1)
            if sequence.params.max_rounds is not None:
                most = min(most, sequence.params.max_rounds - 1)
            if self.draft_kv:
                most = min(most, self.draft_kv.max_len - row.first - 1)
            if most > 0 and sequence.num_tokens >= drafter.resume_at:
                is_looked_up = isinstance(drafter, Drafter)
                found[i] = self._look_up(sequence, drafter, most) if is_looked_up else self._guess(sequence, most)
        if self.draft_kv is not None:
            found = {i: found[i] for i in self.draft_kv.catch_up(plan, found)}
        if any(found.values()):
            add_drafts(plan, self.tables, found)

    def _share(self, plan: StepPlan) -> int:
        """Drafts that each row of a step that decodes may have."""
        return self.drafts // len(plan.rows) - 1

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        """So many tokens that the draft model will say of a sequence."""
        return [UNKNOWN] * most

    def _look_up(self, sequence: Sequence, drafter: Drafter, most: int) -> list[int]:
        """So many tokens that a sequence may go on with; [] if there is nothing to go by."""
        drafter.read(sequence.tokens_between(drafter.num_read, sequence.num_tokens))
        return drafter.find(most)

    def _reserve_ahead(self, plan: StepPlan) -> None:
        """Let every row of a plan that only decodes go on for some rounds: fewer when somebody watches or waits.

        Never more than any of them asked for: nobody's tokens are handed out before the last round ends. When somebody
        waits for a place, no round is run beyond the first budget that ends.
        """
        asked = [rounds for row in plan.rows if (rounds := row.sequence.params.max_rounds) is not None]
        most = min([self.max_rounds, *asked])
        if self.waiting or any(map(_wants_host_soon, plan.rows)):
            most = min(most, WATCHED_ROUNDS)
        if self.waiting:
            most = min(most, *(row.sequence.max_tokens - row.sequence.num_output for row in plan.rows))
        if most > 1:
            reserve_rounds(plan, self.tables, most)

    def _order_running(self) -> None:
        """Put the tenants that were served less before those that were served more, each in its own order."""
        head = self.waiting.peek()
        order = self.tenants.begin_step(head and head.tenant)
        if order:
            rows: dict[Tenant, list[Sequence]] = {tenant: [] for tenant in order}
            for sequence in self.running:
                rows[sequence.tenant].append(sequence)
            self.running[:] = chain.from_iterable(rows.values())

    def _make_room_for_head(self) -> None:
        """Preempt running sequences, when that lets the head of the queue in.

        A victim may be a relative whose pages the head would have begun with. Then more may have to go.
        """
        limits = Limits(self.max_num_seqs, self.max_num_batched_tokens)
        head = self.waiting.peek()
        while head is not None and self.running:
            victims = choose_victims(head, self.running, self.tables, self.tenants, limits)
            if not victims:
                return
            for victim in victims:
                self._preempt(victim)
                head.tenant.owed += PRICE * (victim.tenant is not head.tenant)

    # -- preempt -------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, *, swap: bool | None = None) -> None:
        """Take a running sequence's pages between two steps; None lets the scheduler choose how."""
        if self.in_flight is not None:
            raise RuntimeError("a step is in flight: preempt between two steps")
        if sequence.state is not SequenceState.RUNNING:
            raise ValueError(f"sequence {sequence.name} is {sequence.state}, not running")
        self.running.remove(sequence)
        self._put_back(sequence, swap=swap)

    def _preempt(self, victim: Sequence) -> None:
        """Take the row and the pages of a running sequence."""
        if self.running[-1] is victim:  # the usual case, and O(1)
            self.running.pop()
        else:
            self.running.remove(victim)
        self._put_back(victim)

    def _put_back(self, victim: Sequence, *, swap: bool | None = None) -> None:
        """To the queue, its pages in host memory or to be computed again."""
        if self.tables.can_swap_out(victim) and (self._prefers_swap(victim) if swap is None else swap):
            self.tables.swap_out(victim)
            victim.move_to(SequenceState.SWAPPED)
            self.num_swaps += 1
        else:
            self.tables.release(victim)
            victim.move_to(SequenceState.WAITING)
            self.num_recomputes += 1
        victim.preemptions += 1
        self.waiting.push(victim)
        self.tenants.stop(victim.tenant)

    def _prefers_swap(self, victim: Sequence) -> bool:
        if self.preemption == "auto":
            return prefers_swap(victim, self.tables, self.costs)
        return self.preemption == "swap"

    # -- weights -------------------------------------------------------------------------------------------------

    def set_version(self, version: Version, running: str) -> list[Sequence]:
        """New weights compute from now on. What was computed before is kept, computed again, or aborted.

        A request that has begun is aborted whole. Returns the aborted ones.
        """
        if self.in_flight is not None:
            raise RuntimeError("a step is in flight: change weights between two steps")
        self.tables.weights = Weights(version, self.tables.weights.change + 1)
        begun = [*self.running, *(s for s in self.waiting if s.num_output or s.state is SequenceState.SWAPPED)]
        aborted = []
        if running == "abort":
            families = {id(s.family): list(s.family) for s in begun}.values()
            aborted = [s for s in chain.from_iterable(families) if self.abort(s)]
        if running == "recompute":
            for sequence in begun:
                if sequence.state is SequenceState.RUNNING:
                    self.preempt(sequence, swap=False)
                elif sequence.state is SequenceState.SWAPPED:
                    self._lose_host_pages(sequence)
        if running != "keep":  # who waits may have lost its pages in the middle of a prompt that is scored
            for sequence in self.waiting:
                sequence.forget_prompt_scores()
        return aborted

    def _lose_host_pages(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        sequence.move_to(SequenceState.WAITING)  # it stays where it is in the queue

    # -- a step that failed --------------------------------------------------------------------------------------

    def fail(self, plan: StepPlan) -> None:
        """The step in flight came to nothing on the host's side: its requests end, nobody else's."""
        self._drop_plan()
        for row in plan.rows:
            for sequence in list(row.sequence.family):
                self.abort(sequence)

    def recompute(self, *, failed: bool) -> None:
        """What the pages held is lost: everybody who runs starts over, from the tokens they have.

        `failed` says that the device is to blame; whoever was there the last time too ends.
        """
        self._drop_plan()
        for sequence in self.running[::-1]:
            sequence.num_failures += failed
            if sequence.num_failures > 1:
                for waiting_for_prompt in list(self.waiting_for_prompt.get(sequence.request.id, ())):
                    self.abort(waiting_for_prompt)
                self.abort(sequence)
            else:
                self.preempt(sequence, swap=False)
        self.tables.clear_prefix_cache()

    def lose_pages(self) -> None:
        """Every page is given up, in host memory too: who has begun starts over, from the tokens they have."""
        self.recompute(failed=False)
        for sequence in self.waiting:
            if sequence.state is SequenceState.SWAPPED:
                self._lose_host_pages(sequence)

    def clear_prefix_cache(self) -> int:
        """Forget every known page that no sequence holds; returns how many."""
        return self.tables.clear_prefix_cache()

    def close(self) -> None:
        """Nothing is asked of it any more. One that writes down what it decides ends its file here."""

    def _drop_plan(self) -> None:
        """Forget the step in flight. What it was to move to the host may never have arrived there."""
        self.in_flight = None
        self._drop_finished()
        self.lose_pending_swaps()

    def lose_pending_swaps(self) -> None:
        """Pages that are on their way to the host will not arrive: compute them again."""
        for sequence in self.tables.swapped_out:
            if sequence.state is SequenceState.SWAPPED:
                self._lose_host_pages(sequence)
        self.tables.dispatched()

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take over what a step produced: tokens up to the first stop, log-probabilities, computed positions."""
        if plan is not self.in_flight:
            raise RuntimeError("this is not the plan in flight; each plan is committed once")
        self.in_flight = None
        self.tables.dispatched()
        weights, page_size, prompts_done = self.tables.weights, self.tables.page_size, []
        counts = [row.sequence.state is SequenceState.RUNNING for row in plan.rows]  # not aborted in flight
        if (drafted_BR := result.drafted_BR) is not None:
            guesses = zip(plan.drafts.items(), drafted_BR.tolist(), strict=False)
            plan.drafts |= {i: guessed[: len(drafts)] for (i, drafts), guessed in guesses}
        samples = plan.judged_samples
        if not all(counts):
            samples = [(i, sample) for i, sample in samples if counts[sample.row]]
        accept_scores(plan, result)  # what a row scores comes before what it draws
        events = accept_tokens(samples, result, weights.version, plan.drafts)
        broken = {event.sequence for event in events if event.finish_reason is FinishReason.NOT_FINITE}
        accept_pooled(plan, result)
        if self.draft_kv is not None:
            self.draft_kv.commit(plan, has_failed=drafted_BR is not None and drafted_BR.size == 0)
        num_served = 0
        for is_alive, row in zip(counts, plan.rows, strict=True):
            if is_alive:
                sequence, first = row.sequence, row.first
                sequence.num_computed = end = computed_end(row)
                charged = sequence.num_charged
                if end > charged:  # `Sequence.charge`, inlined: this runs once for each row of each step
                    num_tokens = end - (first if first > charged else charged)
                    sequence.tenant.clock += num_tokens / sequence.tenant.weight
                    sequence.num_charged = end
                    num_served += num_tokens
                if first == 0:
                    sequence.kv_weights = weights
                elif sequence.kv_weights != weights:
                    sequence.kv_weights = None  # two; stays so until it is computed anew
                if (len(sequence.pages) - 1) * page_size >= sequence.num_computed:
                    self.tables.trim(sequence)
                if end >= (sequence.num_published + 1) * page_size and sequence not in broken:
                    self.tables.publish(sequence)
                if sequence.windows:
                    self.tables.slide(sequence)
                if first < sequence.prompt_len <= first + row.num_tokens:
                    prompts_done.append(sequence)
        self.tenants.advance(num_served)  # before any of them ends
        for i, drafts in plan.drafts.items():
            if counts[i]:
                self._learn(plan.rows[i], len(drafts))
        for event in events:
            if event.finish_reason:
                self._finish(event.sequence, event.finish_reason)
        for sequence in prompts_done:
            events += self._commit_prompt(sequence)
        if any(event.finish_reason for event in events):
            self._drop_finished()
        return events

    def _learn(self, row: Row, num_drafted: int) -> None:
        sequence = row.sequence
        # Beside the newest token before the step and the last draw.
        num_accepted = max(sequence.num_tokens - row.first - 2, 0)
        self.drafted_tokens += num_drafted
        self.accepted_drafts += num_accepted
        if sequence.drafter:
            sequence.drafter.learn(sequence.num_tokens, num_drafted, num_accepted)

    def _commit_prompt(self, sequence: Sequence) -> list[TokenEvent]:
        """A prompt is computed: who wanted no more ends, and those who waited for it queue for rows of their own."""
        family = [sequence, *self.waiting_for_prompt.pop(sequence.request.id, ())]
        events = []
        for member in family:
            if sequence.max_tokens == 0 and member.state is not SequenceState.FINISHED:
                reason = FinishReason.LENGTH if has_finite_results(member) else FinishReason.NOT_FINITE
                self._finish(member, reason)
                events.append(TokenEvent(member, (), reason))
            elif member.state is SequenceState.WAITING:
                self.waiting.push(member)
        return events

    def _drop_finished(self) -> None:
        self.running = [s for s in self.running if s.state is SequenceState.RUNNING]

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.request.keeps_end and reason not in (FinishReason.ABORT, FinishReason.NOT_FINITE):
            self.tables.publish_end(sequence)
        if sequence.state is SequenceState.RUNNING:
            self.tenants.stop(sequence.tenant)
        sequence.finish(reason)
        self.tables.release(sequence)


def _wants_host_soon(row: Row) -> bool:
    """Whether somebody watches the sequence, or the host has something to say before it goes on."""
    sequence = row.sequence
    is_drafted = sequence.drafter is not None and sequence.num_tokens < sequence.drafter.hopes_until
    return sequence.request.stream or sequence.grammar is not None or is_drafted
