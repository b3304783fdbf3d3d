"""Bugs that somebody might write: each is put into the code, and the histories must find it.

A mutation is a function that patches classes through pytest's monkeypatch; its name says what goes wrong.
"""

from dataclasses import replace

from quire.core import commit, forks, preemption, scheduler
from quire.core.page_pool import PagePool, WindowPool
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
RARE_MUTATIONS = {}
"""Those that histories meet once in 100,000 operations: exact tests of tests/core/test_prefix_cache.py find them."""


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
        return found._replace(pages=[*found.pages, found.copy_from], copy_from=None)

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
            self.tables.pool.drop(sequence.pages)
        return abort(self, sequence)

    patch.setattr(Scheduler, "abort", abort_twice)


@mutation
def reuse_a_swapped_page(patch):
    """Host pages count as free as soon as they are filled."""
    swap_out = PageTables.swap_out

    def swap_out_and_forget(self, sequence):
        swap_out(self, sequence)
        self.pool.host.release(sequence.host_pages)

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

    empty = PageTables._empty

    def empty_all_but_one(self, sequence):
        kept = sequence.pages[-1:] if sequence.state is SequenceState.FINISHED else sequence.pages[:0]
        del sequence.pages[len(sequence.pages) - len(kept) :]
        empty(self, sequence)
        sequence.pages = kept

    patch.setattr(PageTables, "_empty", empty_all_but_one)


@mutation
def forget_the_copies(patch):
    """The partial page of a fork is never copied."""
    take = PagePool.take_operations

    def take_without_copies(self):
        operations = take(self)
        operations.copies = []
        return operations

    patch.setattr(PagePool, "take_operations", take_without_copies)


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
    take = PagePool.take_operations

    def take_all(self):
        freed = list(dict.fromkeys(self._freed))
        operations = take(self)
        operations.poisons = freed
        return operations

    patch.setattr(PagePool, "take_operations", take_all)


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
        self.plan.scores = [s for s in self.plan.scores if s.position != last or last < 3]

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
def accept_what_was_drawn_behind_a_wrong_draft(patch):
    """The first draw after a mistake is accepted, too."""
    agreed = commit.agreed_draws
    patch.setattr(commit, "agreed_draws", lambda draws, drafts: draws[: len(agreed(draws, drafts)) + 1])


@mutation
def draft_while_stops_are_forbidden(patch):
    """Drafts go beyond `min_tokens`: stop ids stay forbidden behind all of them."""
    patch.setattr(scheduler, "most_unseen", lambda sequence: 1 if sequence.grammar else 8)


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
def share_forced_tokens_with_the_parent(patch):
    """A fork takes the parent's pages for its forced tokens, too."""
    join = Sequence.join_family

    def join_with_all_tokens(self):
        self.num_inherited = self.num_tokens
        join(self)

    patch.setattr(Sequence, "join_family", join_with_all_tokens)


@mutation
def start_behind_what_must_be_scored(patch):
    """A fork begins with all that its parent has computed, though logits of it are asked for."""
    find_prefix = PageTables.find_prefix

    def find_all(self, sequence, unwritten=()):
        asked, sequence.params = sequence.params, replace(sequence.params, logprobs=None)
        found = find_prefix(self, sequence, unwritten)
        sequence.params = asked
        return found

    patch.setattr(PageTables, "find_prefix", find_all)


@mutation
def keep_an_end_that_is_too_long(patch):
    """The last page of what keeps its end is known as if its newest token, which nobody computed, were in it."""
    publish_end = PageTables.publish_end

    def publish_longer(self, sequence):
        sequence.num_computed += sequence.num_computed % self.page_size < self.page_size - 1
        sequence.num_computed = min(sequence.num_computed, sequence.num_tokens)
        publish_end(self, sequence)

    patch.setattr(PageTables, "publish_end", publish_longer)


@mutation
def share_an_end_instead_of_copying_it(patch):
    """Whoever finds a kept end writes into it."""
    start = PageTables.start

    def start_with_the_end(self, sequence, prefix):
        if prefix.copy_from is not None and sequence.request.keeps_end and not self.windows:
            prefix = prefix._replace(pages=[*prefix.pages, prefix.copy_from], copy_from=None)
        start(self, sequence, prefix)

    patch.setattr(PageTables, "start", start_with_the_end)


@mutation
def sleep_with_pages(patch):
    """Host pages are believed to survive a sleep."""
    patch.setattr(Scheduler, "lose_pages", lambda self: self.recompute(failed=False))


@mutation
def trust_forced_tokens(patch):
    """Nobody looks whether a fork ends with the tokens it begins with."""
    patch.setattr(forks, "stop_reason", lambda sequence: None)


@mutation
def keep_the_parents_seed(patch):
    """A fork draws by its parent's seed, whatever its own is."""
    inherit = Sequence.inherit

    def inherit_the_seed(self, parent):
        inherit(self, parent)
        self.seed = parent.seed

    patch.setattr(Sequence, "inherit", inherit_the_seed)


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


MUTATIONS |= {f"ignore_{name}": ignore(name) for name in FIELDS if name != "pooling"}  # see test_embed.py


@mutation
def slide_a_position_too_far(patch):
    """A window gives back a page whose last position the next token still sees; the audit counts the same."""
    patch.setattr(WindowPool, "first_seen", lambda self, p: max(p - self.window + 2, 0) // self.page_size)


@mutation
def never_slide(patch):
    """Layers that see a window keep every page."""
    patch.setattr(PageTables, "slide", lambda self, sequence: None)


@mutation
def take_a_windows_pages_from_the_front(patch):
    """A fork takes the first pages that a relative still has in a window, whatever positions they hold."""
    seen_by = WindowPool.seen_by

    def seen_from_the_front(self, position, names, table=None):
        found = seen_by(self, position, names, table)
        if found is None or table is None or table.first == self.first_seen(position):
            return found
        return table.pages[: len(found[0])].tolist(), found[1]

    patch.setattr(WindowPool, "seen_by", seen_from_the_front)


@mutation
def share_a_partial_page_of_a_window(patch):
    """A fork takes the parent's last page in a window as it is, instead of a copy."""
    seen_by = WindowPool.seen_by

    def seen_whole(self, position, names, table=None):
        found = seen_by(self, position, names, table)
        return found if found is None or found[1] is None else ([*found[0], found[1]], None)

    patch.setattr(WindowPool, "seen_by", seen_whole)


@mutation
def find_a_prefix_beyond_its_windows(patch):
    """A prefix counts as known where a page that its next token sees in a window is not: another one is taken."""

    def page_of_any(self, position, names, table=None):
        count = -(-position // self.page_size) - self.first_seen(position)
        pages = [page for page in self.prefix_cache.pages if page is not None][:count] if self.prefix_cache else []
        return (
            (pages, None)
            if len(pages) == count and not position % self.page_size
            else seen_by(self, position, names, table)
        )

    seen_by = WindowPool.seen_by
    patch.setattr(WindowPool, "known_end", lambda self, names, end: end)
    patch.setattr(WindowPool, "seen_by", page_of_any)


@mutation
def leave_a_windows_pages_on_the_host(patch):
    """What a swapped sequence had in a window does not come back."""
    swap_in = WindowPool.swap_in

    def swap_nothing_in(self, host_pages):
        pages = swap_in(self, host_pages)
        self.operations.swap_ins = []
        return pages

    patch.setattr(WindowPool, "swap_in", swap_nothing_in, raising=False)


@mutation
def admit_by_the_first_pool_alone(patch):
    """Who is admitted finds room in the first pool, and perhaps none in a window."""
    has_room = PageTables.has_room

    def first_has_room(self, counts):
        return has_room(self, [next(iter(counts)), *(0 for _ in self.windows)])

    patch.setattr(PageTables, "has_room", first_has_room)


@mutation
def grow_by_the_first_pool_alone(patch):
    """A sequence grows while the first pool has pages, whatever a window has."""
    patch.setattr(PageTables, "num_available", property(lambda self: self.pool.num_available))


@mutation
def reserve_ahead_by_the_first_pool_alone(patch):
    """Rounds are planned as far as the first pool has free pages, whatever a window has."""

    def reachable_end(self, sequence, end):
        num_pages = len(sequence.pages) + self.pool.allocator.num_free
        return min(end, num_pages * self.page_size)

    patch.setattr(PageTables, "reachable_end", reachable_end)


@mutation
def promise_nothing_in_windows(patch):
    """Somebody is admitted into the pages of a window that who runs needs in this very step."""
    num_promised = PageTables.num_promised

    def promised_first(self, running):
        return [num_promised(self, running)[0], *(0 for _ in self.windows)]

    patch.setattr(PageTables, "num_promised", promised_first)


@mutation
def make_room_in_the_first_pool_alone(patch):
    """Nobody gives way for the first in order when only a window has no room for it."""
    patch.setattr(preemption._Room, "is_enough", property(lambda self: self._missing[0] <= 0))


@mutation
def take_a_known_page_of_a_window_for_nothing(patch):
    """A prefix found in a window counts as gained, though its idle pages are no longer there for others."""
    patch.setattr(WindowPool, "num_idle", lambda self, pages: 0, raising=False)


def rare_mutation(function):
    RARE_MUTATIONS[function.__name__] = function
    return function


@rare_mutation
def share_a_last_page_of_two_weight_versions(patch):
    """The last page of a sequence that ends is findable whatever weights its KV is of."""
    publish_end = PageTables.publish_end

    def publish(self, sequence):
        sequence.kv_weights = self.weights
        publish_end(self, sequence)

    patch.setattr(PageTables, "publish_end", publish)


@rare_mutation
def reach_ahead_by_the_first_pool_alone(patch):
    """How far a dispatch may reach is decided without the pages that windows have left."""

    def reachable_end(self, sequence, end):
        num_pages = min(self.pages_for(end), len(sequence.pages) + self.pool.allocator.num_free)
        return min(end, num_pages * self.page_size)

    patch.setattr(PageTables, "reachable_end", reachable_end)
