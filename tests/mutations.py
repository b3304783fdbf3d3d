"""Bugs that somebody might write: each is put into the code, and the histories must find it.

A mutation is a function that patches classes through pytest's monkeypatch; its name says what goes wrong.
"""

from dataclasses import replace

from quire.core.page_tables import PageTables, ReusedPrefix
from quire.core.pages import PageAllocator
from quire.core.planner import Planner
from quire.core.prefix_cache import PrefixCache
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceState
from quire.engine import packer
from quire.engine.engine import Engine
from quire.text.detokenizer import Detokenizer
from tests.histories import DEFAULTS, FIELDS, ToyGrammar

MUTATIONS = {}


def mutation(function):
    MUTATIONS[function.__name__] = function
    return function


@mutation
def skip_a_decrement(patch):
    """Releasing three pages or more forgets the last."""
    release = PageAllocator.release
    patch.setattr(PageAllocator, "release", lambda self, pages: release(self, pages[:-1] if len(pages) > 2 else pages))


@mutation
def share_a_partial_page(patch):
    """A fork takes the parent's last page as it is, instead of a copy."""
    find_prefix = PageTables.find_prefix

    def find_whole(self, sequence, unwritten=()):
        found = find_prefix(self, sequence, unwritten)
        if found.copy_from is None:
            return found
        return ReusedPrefix([*found.pages, found.copy_from], found.num_tokens, None, found.num_published)

    patch.setattr(PageTables, "find_prefix", find_whole)


@mutation
def publish_a_hash_early(patch):
    """Pages are findable once they are planned, before the step that writes them is committed."""
    add = Planner.add
    tables = None

    def admit(self, planner, promised):
        nonlocal tables
        tables = self.tables
        return original_admit(self, planner, promised)

    original_admit = Scheduler._admit_head

    def add_and_publish(self, sequence, num_tokens, waiting_for_prompt=()):
        add(self, sequence, num_tokens, waiting_for_prompt)
        if tables and sequence.num_computed == 0:
            sequence.kv_weights, sequence.num_computed = tables.weights, num_tokens
            tables.publish(sequence)
            sequence.num_computed = 0

    patch.setattr(Scheduler, "_admit_head", admit)
    patch.setattr(Planner, "add", add_and_publish)


@mutation
def free_twice_at_abort(patch):
    """An abort releases the pages, and the end of the sequence does so again."""
    abort = Scheduler.abort

    def abort_twice(self, sequence):
        if sequence.pages:
            self.tables._drop(sequence.pages)
        return abort(self, sequence)

    patch.setattr(Scheduler, "abort", abort_twice)


@mutation
def reuse_a_swapped_page(patch):
    """Host pages count as free as soon as they are filled."""
    swap_out = PageTables.swap_out

    def swap_out_and_forget(self, sequence):
        swap_out(self, sequence)
        self.host.release(sequence.host_pages)

    patch.setattr(PageTables, "swap_out", swap_out_and_forget)


@mutation
def forget_a_child(patch):
    """The last of those that wait for the prompt never gets into the queue."""
    commit_prompt = Scheduler._commit_prompt

    def commit_all_but_one(self, sequence):
        if len(self.waiting_for_prompt.get(sequence.request.id, ())) > 1:
            self.waiting_for_prompt[sequence.request.id].pop()
        return commit_prompt(self, sequence)

    patch.setattr(Scheduler, "_commit_prompt", commit_all_but_one)


@mutation
def keep_a_tails_page(patch):
    """A finished sequence keeps its last page."""

    def empty_all_but_one(self, sequence):
        kept = sequence.pages[-1:] if sequence.state is SequenceState.FINISHED else sequence.pages[:0]
        pages = sequence.pages[: len(sequence.pages) - len(kept)]
        self._drop(pages)
        sequence.pages = kept
        sequence.num_published = 0

    patch.setattr(PageTables, "_empty", empty_all_but_one)


@mutation
def forget_the_copies(patch):
    """The partial page of a fork is never copied."""
    take = PageTables.take_operations

    def take_without_copies(self):
        operations = take(self)
        operations.copies = []
        return operations

    patch.setattr(PageTables, "take_operations", take_without_copies)


@mutation
def leave_the_version_out_of_the_hash(patch):
    """Pages of the weights before are found after a weight change."""
    hashes = PrefixCache.hashes
    patch.setattr(PrefixCache, "hashes", lambda self, sequence, weights, count: hashes(self, sequence, (0, 0), count))


@mutation
def mix_the_swapped_with_new_weights(patch):
    """A swapped sequence of old weights begins with pages that new ones have computed."""
    find_prefix = PageTables.find_prefix

    def find_any(self, sequence, unwritten=()):
        if sequence.state is not SequenceState.SWAPPED:
            return find_prefix(self, sequence, unwritten)
        pages = self._match(sequence, sequence.num_computed)
        return ReusedPrefix(pages, sequence.num_computed, num_published=len(pages))

    patch.setattr(PageTables, "find_prefix", find_any)


@mutation
def leave_the_salt_out_of_the_hash(patch):
    """One tenant finds another tenant's pages."""
    import quire.core.prefix_cache as module

    root = module.page_root.__wrapped__
    patch.setattr(module, "page_root", lambda size, salt, weights: root(size, "", weights))


@mutation
def publish_two_versions(patch):
    """A sequence that kept its KV over a weight change publishes as if nothing had been."""
    publish = PageTables.publish

    def publish_always(self, sequence):
        if sequence.num_computed:
            before, sequence.kv_weights = sequence.kv_weights, self.weights
            publish(self, sequence)
            sequence.kv_weights = before

    patch.setattr(PageTables, "publish", publish_always)


@mutation
def evict_what_is_held(patch):
    """The prefix cache gives up any page it knows, held or not."""

    def evict_any(self, count):
        evicted = list(self._hash_of)[:count]
        for page in evicted:
            self._idle.pop(page, None)
            del self._page_of[self._hash_of.pop(page)]
        return self._allocator.release(evicted)

    patch.setattr(PrefixCache, "evict", evict_any)


@mutation
def poison_what_was_just_filled(patch):
    """A page that was freed and filled again in one plan is poisoned after it was filled."""
    take = PageTables.take_operations

    def take_all(self):
        freed = list(dict.fromkeys(self._freed))
        operations = take(self)
        operations.poisons = freed
        return operations

    patch.setattr(PageTables, "take_operations", take_all)


@mutation
def copy_from_the_unwritten(patch):
    """A fork copies from a relative whose own pages are only filled by the same plan."""
    find_prefix = PageTables.find_prefix
    patch.setattr(PageTables, "find_prefix", lambda self, sequence, unwritten=(): find_prefix(self, sequence, ()))


@mutation
def believe_a_swap_that_failed(patch):
    """After a step that failed, host pages that it was to fill count as filled."""

    patch.setattr(Scheduler, "lose_pending_swaps", lambda self: self.tables.dispatched())


@mutation
def never_make_room_for_the_head(patch):
    """Whoever is first in order waits until somebody ends."""
    patch.setattr(Scheduler, "_make_room_for_head", lambda self: None)


@mutation
def drop_the_last_score(patch):
    """The log-probability of the last prompt token is never asked for."""
    add = Planner.add

    def add_less(self, sequence, num_tokens, waiting_for_prompt=()):
        add(self, sequence, num_tokens, waiting_for_prompt)
        last = sequence.prompt_len - 1
        self.plan.samples = [s for s in self.plan.samples if s.target is None or s.position != last or last < 3]

    patch.setattr(Planner, "add", add_less)


@mutation
def go_on_past_the_pages(patch):
    """Rows may run more rounds than their pages hold."""
    patch.setattr(PageTables, "reachable_end", lambda self, sequence, end: end)
    grow = PageTables.grow
    patch.setattr(
        PageTables, "grow", lambda self, sequence, end: grow(self, sequence, min(end, len(sequence.tokens) + 1))
    )


@mutation
def go_on_while_stops_are_forbidden(patch):
    """Rounds do not end where `min_tokens` is reached: stop ids stay forbidden in those that follow."""
    reserve = Scheduler._reserve_ahead

    def reserve_more(self, plan):
        reserve(self, plan)
        for i, row in enumerate(plan.rows):
            if row.sequence.num_output < row.sequence.params.min_tokens:
                left = row.sequence.max_tokens - row.sequence.num_output
                end = self.tables.reachable_end(row.sequence, row.first + min(left, self.max_rounds))
                self.tables.grow(row.sequence, end)
                plan.rows[i] = row._replace(max_rounds=end - row.first)

    patch.setattr(Scheduler, "_reserve_ahead", reserve_more)


@mutation
def share_a_grammar(patch):
    """The sequences of a request read with one and the same grammar."""
    patch.setattr(ToyGrammar, "copy", lambda self: self)


@mutation
def forget_the_grammars_place(patch):
    """A sequence that is preempted begins its grammar anew."""
    put_back = Scheduler._put_back

    def put_back_and_forget(self, victim, **how):
        put_back(self, victim, **how)
        if victim.grammar is not None:
            victim.grammar = ToyGrammar()
            victim.mask = victim.grammar.mask()

    patch.setattr(Scheduler, "_put_back", put_back_and_forget)


@mutation
def go_on_without_the_grammar(patch):
    """Rows with a grammar run as many rounds as others."""
    reserve = Scheduler._reserve_ahead

    def reserve_for_all(self, plan):
        grammars = [row.sequence.grammar for row in plan.rows]
        for row in plan.rows:
            row.sequence.grammar = None
        reserve(self, plan)
        for row, grammar in zip(plan.rows, grammars, strict=True):
            row.sequence.grammar = grammar

    patch.setattr(Scheduler, "_reserve_ahead", reserve_for_all)


@mutation
def share_a_detokenizer(patch):
    """A fork reads its tokens with its parent's decoder."""
    patch.setattr(Detokenizer, "fork", lambda self: self)


@mutation
def forget_what_was_read(patch):
    """A fork's text begins where it was cut off its parent."""
    fork = Detokenizer.fork

    def fork_and_forget(self):
        other = fork(self)
        other._num_taken = self._num_taken
        return other

    patch.setattr(Detokenizer, "fork", fork_and_forget)


@mutation
def share_half_a_character(patch):
    """A fork does not know of the bytes that its parent has decoded half."""
    fork = Detokenizer.fork

    def fork_at_a_character(self):
        other = fork(self)
        other._utf8.reset()
        return other

    patch.setattr(Detokenizer, "fork", fork_at_a_character)


@mutation
def share_the_log_probabilities(patch):
    """A fork and its parent write to one list."""
    fork = Sequence.fork

    def fork_without_a_copy(self):
        child = fork(self)
        child.logprobs = self.logprobs
        return child

    patch.setattr(Sequence, "fork", fork_without_a_copy)


@mutation
def penalise_by_the_first_row(patch):
    """Penalties look at the tokens of whoever comes first in the batch."""
    pack = packer.pack_samples

    def pack_with_row_0(samples, num_samples):
        inputs = pack(samples, num_samples)
        return inputs if inputs.row_S is None else replace(inputs, row_S=inputs.row_S * 0)

    patch.setattr(packer, "pack_samples", pack_with_row_0)


def ignore(name):
    """The engine never sees one of the sampling parameters."""

    def put_in(patch):
        add = Engine.add

        def add_without(self, request, grammar=None):
            try:
                params = replace(request.params, **{name: getattr(DEFAULTS, name)})
            except ValueError:  # the others make no sense without it
                return add(self, request, grammar)
            return add(self, replace(request, params=params), None if name == "structured" else grammar)

        patch.setattr(Engine, "add", add_without)

    return put_in


MUTATIONS |= {f"ignore_{name}": ignore(name) for name in FIELDS}
