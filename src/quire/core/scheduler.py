"""Who runs next, and every movement of a page.

Continuous batching over one pool: each step gives every decoding sequence its one token, spends the rest of the
token budget on prompts in chunks, and mixes both. Order is priority, then arrival; nothing overtakes. Pages are
reserved before the step that writes them; when none is left the last in order gives its pages back and will be
recomputed. `commit` is the only judge of what a step produced.

Costs are linear in what runs and independent of what waits and of the pool's size. Refuses to know: tensors, text.
"""

from bisect import insort

from quire.core.errors import AuditError, RequestError
from quire.core.pages import PageAllocator
from quire.core.plan import PageOperations, Row, Sample, StepPlan, StepResult
from quire.core.waiting import WaitingQueue
from quire.request import FinishReason, Sequence, SequenceState, TokenEvent, TokenLogprob


class Scheduler:
    """Owns the waiting queue, the running list and the page allocator."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_samples: int | None = None,
        poison_freed: bool = False,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(f"{max_num_batched_tokens=} must be at least {max_num_seqs=}")
        self.allocator = allocator
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_samples = max_num_seqs if max_num_samples is None else max_num_samples
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order; the last one is the first to be preempted."""
        self.num_preemptions = 0
        self._poison_freed = poison_freed
        self._freed: list[int] = []
        self._in_flight: StepPlan | None = None

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_tokens // self.page_size)

    def check_fits(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Refuse a sequence that could not run even alone."""
        # The last token drawn never needs a place: no later token looks at it.
        needed = self.pages_for(prompt_len + max(max_tokens - 1, 0))
        num_pages = self.allocator.num_pages
        if needed > num_pages:
            raise RequestError(
                f"request {request_id} needs {needed} pages for a prompt of {prompt_len} + {max_tokens} new tokens, "
                f"the pool has {num_pages} pages of {self.page_size} tokens: lower max_tokens or raise num_pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.check_fits(sequence.request.id, sequence.prompt_len, sequence.max_tokens)
        self.waiting.push(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """End a sequence now, whatever it is doing; its pages are back when this returns. False if it had ended.

        Safe while a step is in flight: no page is handed out again before that step is committed.
        """
        if sequence.state is SequenceState.FINISHED:
            return False
        was_waiting = sequence.state is SequenceState.WAITING
        self._finish(sequence, FinishReason.ABORT)
        if was_waiting:
            self.waiting.discard(sequence)
        else:
            self.running.remove(sequence)
        return True

    def reset(self) -> int:
        """Abort everything and say how many that were. Costs what lives, never what the pool could hold."""
        aborted = [*self.running, *self.waiting]
        for sequence in aborted:
            self._finish(sequence, FinishReason.ABORT)
        self.running = []
        self.waiting = WaitingQueue()
        self._in_flight = None
        return len(aborted)

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step and reserve its pages."""
        if self._in_flight is not None:
            raise RuntimeError("the last plan is not committed; commit(N) comes before schedule(N+1)")
        self._make_room_for_priority()
        planner = _Planner(self.max_num_batched_tokens, self.max_num_samples, self.running)
        if self._plan_running(planner):
            self._admit(planner)
        plan = planner.plan
        if plan:
            plan.operations = PageOperations(poisons=self._freed)
            self._freed = []
            self._in_flight = plan
        return plan

    def _plan_running(self, planner: "_Planner") -> bool:
        """Give every running sequence its share, in order. False if somebody had to be preempted."""
        preemptions_before = self.num_preemptions
        running, page_size = self.running, self.page_size
        position = 0
        while position < len(running):
            sequence = running[position]
            planner.claim(sequence)
            num_tokens = planner.share(sequence)
            if num_tokens:
                end = sequence.num_computed + num_tokens
                if end > len(sequence.pages) * page_size and not self._reserve(sequence, end):
                    break  # it gave up its own place, and everybody after it had done so before
                planner.add(sequence, num_tokens)
            position += 1
        return self.num_preemptions == preemptions_before

    def _admit(self, planner: "_Planner") -> None:
        """Start waiting sequences while rows, tokens and pages last. The head of the queue is never overtaken."""
        if not self.waiting:
            return
        promised = sum(map(self._growth, self.running))
        while len(self.running) < self.max_num_seqs and (head := self.waiting.peek()) is not None:
            num_tokens = planner.share(head)
            if num_tokens == 0 or self.pages_for(len(head.tokens)) + promised > self.allocator.num_free:
                return
            self.waiting.pop()
            head.move_to(SequenceState.RUNNING)
            insort(self.running, head, key=_order)
            self._reserve(head, num_tokens)
            promised += self._growth(head)
            planner.add(head, num_tokens)

    def _growth(self, sequence: Sequence) -> int:
        """Pages that a running sequence is promised: for the tokens it has, and one to grow into.

        Nobody is admitted into these, so that admitting somebody does not preempt somebody else in the next step.
        """
        return 1 + max(self.pages_for(len(sequence.tokens)) - len(sequence.pages), 0)

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Give a sequence pages for positions below `end`, preempting from the back. False if it went itself."""
        missing = self.pages_for(end) - len(sequence.pages)
        while missing > self.allocator.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(self.allocator.allocate(missing))
        return True

    def _make_room_for_priority(self) -> None:
        """Preempt lower priorities when that lets the head of the queue in."""
        head = self.waiting.peek()
        if head is None or not self.running or self.running[-1].priority >= head.priority:
            return
        higher = [s for s in self.running if s.priority >= head.priority]
        lower = self.running[len(higher) :]
        needed = self.pages_for(len(head.tokens)) + sum(map(self._growth, higher)) - self.allocator.num_free
        tokens_before = sum(len(s.tokens) - s.num_computed for s in higher)
        if needed > sum(len(s.pages) for s in lower) or tokens_before >= self.max_num_batched_tokens:
            return  # it would still not run in this step
        needed += sum(map(self._growth, lower))
        while lower and (needed > 0 or len(self.running) >= self.max_num_seqs):
            victim = lower.pop()
            needed -= len(victim.pages) + self._growth(victim)
            self._preempt(victim)

    def _preempt(self, victim: Sequence) -> None:
        """Take the last running sequence's pages; it waits for its place and is then recomputed."""
        removed = self.running.pop()
        if removed is not victim:
            raise AuditError(f"preempting {victim.request.id}, but the last running is {removed.request.id}")
        self._release(victim)
        victim.num_computed = 0
        victim.preemptions += 1
        self.num_preemptions += 1
        victim.move_to(SequenceState.WAITING)
        self.waiting.push(victim)

    # -- a step that failed --------------------------------------------------------------------------------------

    def fail(self, plan: StepPlan) -> None:
        """The step in flight came to nothing on the host's side: its sequences end, nobody else's."""
        self._in_flight = None
        self._drop_finished()
        for row in plan.rows:
            self.abort(row.sequence)

    def recompute(self, *, failed: bool) -> None:
        """What the pages held is lost: everybody who runs starts over, from the tokens they have.

        `failed` says that the device is to blame; whoever was there the last time too ends.
        """
        self._in_flight = None
        self._drop_finished()
        for sequence in self.running[::-1]:
            sequence.num_failures += failed
            if sequence.num_failures > 1:
                self.abort(sequence)
            else:
                self._preempt(sequence)

    # -- commit --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take over what a step produced: tokens up to the first stop, log-probabilities, computed positions."""
        if plan is not self._in_flight:
            raise RuntimeError("this is not the plan in flight; each plan is committed once")
        self._in_flight = None
        prompts_done = []
        for sequence, first, num_tokens, _ in plan.rows:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed = first + num_tokens
                if sequence.max_tokens == 0 and sequence.num_computed == sequence.prompt_len:
                    prompts_done.append(sequence)
        events = self._commit_samples(plan.samples, result)
        for sequence in prompts_done:
            self._finish(sequence, FinishReason.LENGTH)
            events.append(TokenEvent(sequence, (), FinishReason.LENGTH))
        if any(event.finish_reason for event in events):
            self._drop_finished()
        return events

    def _drop_finished(self) -> None:
        self.running = [s for s in self.running if s.state is SequenceState.RUNNING]

    def _commit_samples(self, samples: list[Sample], result: StepResult) -> list[TokenEvent]:
        events = []
        all_tokens = result.tokens_SR[: len(samples)].tolist()
        for i, sample in enumerate(samples):
            sequence = sample.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue  # aborted while the step was in flight
            if sample.target is not None:
                sequence.prompt_logprobs.append(_logprob(sequence, result, i, 0))
                continue
            reason, accepted = None, []
            for round_, token_id in enumerate(all_tokens[i]):
                sequence.tokens.append(token_id)
                accepted.append(token_id)
                if sequence.params.logprobs is not None:
                    sequence.logprobs.append(_logprob(sequence, result, i, round_))
                reason = sequence.stop_reason()
                if reason is not None:
                    self._finish(sequence, reason)
                    break
            events.append(TokenEvent(sequence, tuple(accepted), reason))
        return events

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish(reason)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        freed = self.allocator.release(sequence.pages)
        del sequence.pages[:]
        if self._poison_freed:
            self._freed.extend(freed)

    # -- audit ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Check every invariant of ownership between two steps; raises AuditError."""
        for sequence in self.running:
            if sequence.state is not SequenceState.RUNNING:
                raise AuditError(f"sequence {sequence.request.id} is in the running list and {sequence.state}")
            expected = self.pages_for(sequence.num_computed)
            if self._in_flight is None and len(sequence.pages) != expected:
                raise AuditError(
                    f"sequence {sequence.request.id}/{sequence.index}: {len(sequence.pages)} pages for "
                    f"{sequence.num_computed} computed tokens, expected {expected}"
                )
        if any(a.order > b.order for a, b in zip(self.running, self.running[1:], strict=False)):
            raise AuditError("the running list is out of order")
        for sequence in self.waiting:
            if sequence.pages or sequence.num_computed:
                raise AuditError(f"sequence {sequence.request.id} waits and holds {len(sequence.pages)} pages")
        self.allocator.audit(page for sequence in self.running for page in sequence.pages)


class _Planner:
    """Fills one plan within the step's budgets.

    Until a running sequence is claimed, the token (if it decodes) and the sample that are its due are set aside, so
    that a long prompt before it in order cannot take them.
    """

    def __init__(self, max_tokens: int, max_samples: int, running: list[Sequence]) -> None:
        self.plan = StepPlan()
        self._tokens_left = max_tokens
        self._samples_left = max_samples
        self._tokens_set_aside = sum(len(s.tokens) - s.num_computed == 1 for s in running)
        self._samples_set_aside = len(running)

    def claim(self, sequence: Sequence) -> None:
        """A running sequence's turn: what was set aside for it is now in the common budget."""
        self._samples_set_aside -= 1
        if len(sequence.tokens) - sequence.num_computed == 1:
            self._tokens_set_aside -= 1

    def share(self, sequence: Sequence) -> int:
        """How many tokens of this sequence fit into the step; 0 for none."""
        computed = sequence.num_computed
        num_tokens = min(len(sequence.tokens) - computed, self._tokens_left - self._tokens_set_aside)
        num_samples = self._samples_left - self._samples_set_aside
        if num_samples < 1:
            return 0
        if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.prompt_len:
            num_scored = max(len(sequence.prompt_logprobs) - 1 - computed, 0)  # before a preemption
            num_tokens = min(num_tokens, num_scored + num_samples)
        return num_tokens

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan the next `num_tokens` of a sequence, and what is to be drawn from them.

        The logits of position p are for position p+1: a chunk [first, end) may score first+1 .. end, where `end`
        itself is drawn, not scored, once every known token is in.
        """
        plan = self.plan
        first = sequence.num_computed
        end = first + num_tokens
        samples, base = plan.samples, plan.num_tokens - first - 1
        num_samples_before = len(samples)
        if sequence.params.prompt_logprobs:
            for position in range(max(first + 1, len(sequence.prompt_logprobs)), min(end + 1, sequence.prompt_len)):
                samples.append(Sample(sequence, base + position, position, sequence.tokens[position]))
        if end == len(sequence.tokens) and sequence.max_tokens:
            samples.append(Sample(sequence, base + end, end, None))
        plan.rows.append(Row(sequence, first, num_tokens, 1))
        plan.num_tokens += num_tokens
        self._tokens_left -= num_tokens
        self._samples_left -= len(samples) - num_samples_before


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _logprob(sequence: Sequence, result: StepResult, sample: int, round_: int) -> TokenLogprob:
    count = sequence.params.logprobs or 0
    top = zip(
        result.top_ids_SRX[sample, round_, :count].tolist(),
        result.top_logprobs_SRX[sample, round_, :count].tolist(),
        strict=True,
    )
    return TokenLogprob(int(result.tokens_SR[sample, round_]), float(result.logprobs_SR[sample, round_]), tuple(top))
