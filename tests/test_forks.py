"""Many sequences from one prompt: computed once, shared page by page, each its own from there on."""

import pytest

from quire import SamplingParams
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sequence import SequenceState
from quire.core.stopping import FinishReason
from quire.llm import new_text
from quire.structured.form import Structured
from quire.testing import InjectedError, fake_engine
from tests.reference import expected_end
from tests.tiny import tiny_config, tiny_llm
from tests.words import tiny_tokenizer, toy_tokenizer


def request(i="r", prompt_len=10, **params) -> Request:
    return Request(id=str(i), prompt_token_ids=tuple(range(1, 1 + prompt_len)), params=SamplingParams(**params))


def engine(**knobs):
    defaults = {"num_pages": 200, "max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 128, "debug": True}
    return fake_engine(vocab_size=97, **(defaults | knobs))


def test_64_children_of_520_tokens_hold_32_shared_pages_and_their_own():
    """The prompt's 32 full pages once; each child its copy of the page with the last 8 tokens."""
    e = engine(page_size=16, num_pages=256, max_num_batched_tokens=512, max_model_len=640)
    prompt = tuple(i % 90 + 1 for i in range(520))
    params = SamplingParams(n=64, seed=1, max_tokens=8, ignore_eos=True)
    family = e.add(Request(id="520", prompt_token_ids=prompt, params=params))
    for _ in range(2):
        e.step()
    assert all(sequence.num_output == 1 for sequence in family), "all drew from the same logits"
    assert e.stats().computed_tokens == 520
    before = e.stats().page_copies
    e.step()
    stats = e.stats()
    assert (stats.running, stats.shared_pages, stats.held_pages) == (64, 32, 32 + 64)
    assert stats.page_copies - before == 63, "all in one step; the first child writes on in the original"
    assert len({sequence.pages[-1] for sequence in family}) == 64
    assert stats.computed_tokens == 520 + 64
    while e.has_work:
        e.step()
    assert e.stats().computed_tokens == 520 + 64 * 7
    assert e.stats().held_pages == 0


@pytest.mark.parametrize("n", [2, 7, 40])
@pytest.mark.parametrize("knobs", [{}, {"max_num_seqs": 3}, {"prefix_cache": False, "max_num_seqs": 5}], ids=str)
def test_children_draw_what_they_would_draw_alone(n, knobs):
    """Whether they draw with the first, or start when a row is free."""
    e = engine(**knobs)
    params = {"seed": 5, "max_tokens": 6, "ignore_eos": True, "n": n}
    together = e.add(request("together", **params))
    while e.has_work:
        e.step()
    assert e.stats().held_pages == 0
    other = engine()
    alone = other.add(request("alone", **params))
    for sequence in alone[1:-1]:  # only the first and the last are left
        other.abort(sequence)
    while other.has_work:
        other.step()
    assert together[-1].tokens == alone[-1].tokens
    assert together[0].tokens == alone[0].tokens
    assert len({tuple(sequence.tokens) for sequence in together}) > 1


def test_the_prompt_is_computed_once_even_in_chunks_and_when_rows_are_few():
    e = engine(max_num_seqs=4, max_num_batched_tokens=8)
    e.add(request(prompt_len=30, n=9, seed=1, max_tokens=2, ignore_eos=True))
    while e.has_work:
        e.step()
    # 30 for the prompt and one for each child's second token. Who starts when nobody of the family runs finds the 28
    # tokens of full pages, and computes two more.
    assert e.stats().computed_tokens <= 30 + 9 + 2 * 5


def test_children_end_and_are_aborted_one_by_one():
    e = engine()
    a, b, c = e.add(request(n=3, seed=1, max_tokens=50, ignore_eos=True))
    for _ in range(3):
        e.step()
    held = e.stats().held_pages
    assert e.abort(b) == 1
    assert e.abort(b) == 0
    assert (b.state, len(b.pages)) == (SequenceState.FINISHED, 0)
    assert e.stats().held_pages < held
    assert {event.sequence for event in e.step()} == {a, c}
    assert e.abort("r") == 2
    assert e.stats().held_pages == 0


def test_when_the_first_is_aborted_the_next_computes_the_prompt():
    e = engine(max_num_batched_tokens=64, max_num_seqs=4)
    e.scheduler.max_num_batched_tokens = 8
    a, b, c = e.add(request(prompt_len=30, n=3, seed=1, max_tokens=3, ignore_eos=True))
    e.step()
    e.abort(a)
    while e.has_work:
        e.step()
    assert (a.num_output, b.num_output, c.num_output) == (0, 3, 3)


def test_fork_goes_on_from_the_last_committed_token():
    e = engine(page_size=4)
    (parent,) = e.add(request(prompt_len=6, seed=1, max_tokens=20, ignore_eos=True))
    for _ in range(4):
        e.step()
    child = e.fork(parent)
    assert child.tokens == parent.tokens
    so_far, computed = list(parent.tokens), e.stats().computed_tokens
    e.step()
    assert list(child.pages)[:2] == list(parent.pages)[:2], "nine of its ten tokens were computed: two pages are full"
    assert child.pages[2] != parent.pages[2]
    assert e.stats().computed_tokens == computed + 2
    while e.has_work:
        e.step()
    assert child.tokens[: len(so_far)] == parent.tokens[: len(so_far)] == so_far
    assert child.tokens != parent.tokens
    assert (child.num_output, child.finish_reason) == (20, FinishReason.LENGTH)


@pytest.mark.parametrize("disturb", ["abort", "swap", "recompute"])
def test_a_fork_survives_whatever_happens_to_its_parent(disturb):
    def run(disturb):
        e = engine(page_size=4, num_host_pages=50)
        (parent,) = e.add(request(prompt_len=6, seed=1, max_tokens=20, ignore_eos=True))
        for _ in range(4):
            e.step()
        child = e.fork(parent)
        if disturb == "abort":
            e.abort(parent)
        elif disturb:
            e.scheduler.preempt(parent, swap=disturb == "swap")
        while e.has_work:
            e.step()
        return child.tokens

    assert run(disturb) == run(None)


def test_what_cannot_be_forked_says_why():
    e = engine()
    (sequence,) = e.add(request(max_tokens=2, seed=1))
    with pytest.raises(RequestError, match="without a token of its own"):
        e.fork(sequence)
    while e.has_work:
        e.step()
    with pytest.raises(RequestError, match="not alive"):
        e.fork(sequence)


def test_forks_that_have_ended_are_forgotten():
    """Tree search on one request for days: what is pruned leaves nothing behind."""
    e = engine()
    (root,) = e.add(request(seed=1, max_tokens=60, ignore_eos=True))
    e.step()
    indices = set()
    for _ in range(50):
        child = e.fork(root)
        e.step()
        indices.add(child.index)
        e.abort(child)
    assert len(indices) == 50, "no two draw alike"
    assert root.family == [root]
    assert e.abort("r") == 1


FORK_PARAMS = {
    "plain": {},
    "stop strings": {"stop": ["ab a", "bb", "\u00e9"]},
    "included stop": {"stop": ["aa", "ba"], "include_stop": True, "min_tokens": 4},
    "stop ids": {"stop": [[3, 1], [5, 5], [2]], "stop_token_ids": [7]},
    "strings and ids": {"stop": ["ab", [9, 10], [4, 5, 6]], "min_tokens": 6},
    "special tokens": {"skip_special": False, "stop": ["<special>a", "l>b"]},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": True, "stop": ["aba"]},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ["aba"]},
    "grammar": {"structured": Structured(regex="[ab]{4,9}( a)+"), "stop": ["b a"], "min_tokens": 3},
}


@pytest.mark.parametrize("reads", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unread", "read"])
@pytest.mark.parametrize("params", FORK_PARAMS.values(), ids=FORK_PARAMS)
def test_a_fork_says_what_its_tokens_say_alone(params, reads):
    """Wherever it is cut off its parent, and whether or not somebody has read the parent's text by then."""
    num_forks, reasons = 0, set()
    for seed in range(12):
        for fork_at in range(1, 8):
            e = fake_engine(tokenizer=toy_tokenizer(), max_rounds=2, num_pages=40, debug=True)
            (parent,) = e.add(request(prompt_len=6, **{"seed": seed, "max_tokens": 14, "ignore_eos": True} | params))
            parent_read = ""
            while parent.num_output < fork_at and not parent.finish_reason:
                e.step()
                parent_read += new_text(parent) if reads else ""
            if parent.finish_reason:
                continue
            child = e.fork(parent)
            so_far = list(parent.tokens)
            while e.has_work:
                e.step()
                parent_read += new_text(parent) if reads else ""
            num_forks += 1
            reasons.add(child.finish_reason)
            assert child.tokens[: len(so_far)] == so_far
            for sequence, read in ((parent, parent_read), (child, "")):
                form = sequence.params.structured
                grammar = form and e.compile_grammar(form, trusted=True)
                more = {"max_tokens": 14, "eos_ids": e.eos_ids, "tokenizer": e.tokenizer, "grammar": grammar}
                expected = expected_end(sequence.params, sequence.output_token_ids, **more)
                assert (sequence.num_output, sequence.finish_reason, read + new_text(sequence)) == expected
                assert len(sequence.logprobs) == (sequence.num_output if sequence.params.logprobs else 0)
    assert num_forks > 20
    assert len(reasons) > 1 or params == {}


def test_a_stop_string_that_began_before_the_fork_ends_the_child():
    def run(stop=()):
        e = fake_engine(tokenizer=toy_tokenizer(), num_pages=40, eos_ids=(), debug=True)
        (parent,) = e.add(request(prompt_len=6, seed=4, max_tokens=20, ignore_eos=True, stop=stop))
        while parent.num_output < 6:
            e.step()
        child = e.fork(parent)
        while e.has_work:
            e.step()
        return new_text(parent), new_text(child), child

    _, free, child = run()
    before = toy_tokenizer().decode(child.output_token_ids[:6])
    stop = free[len(before) - 1 : len(before) + 1]
    assert stop not in before
    assert len(stop) == 2
    _, text, child = run([stop])
    assert (text, child.finish_reason) == (free[: len(before) - 1], FinishReason.STOP)


def test_forking_a_stream_in_the_middle():
    with tiny_llm(tiny_config(eos_ids=()), tokenizer=tiny_tokenizer(), max_num_seqs=2, debug=True) as llm:
        params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, stop=["never said"])
        text, child = "", None
        for chunk in llm.stream([5, 6, 7], params):
            text += chunk.text
            if len(text) > 4 and child is None:
                (sequence,) = llm.engine.scheduler.running
                child = llm.engine.fork(sequence)
                inherited = sequence.num_output
        assert child is not None
        assert text == llm.tokenizer.decode(sequence.output_token_ids)
        assert child.finish_reason, "leaving the stream ends every sequence of the request"
        assert child.num_output > inherited
        assert new_text(child) == llm.tokenizer.decode(child.output_token_ids)


def test_a_request_that_fails_twice_on_the_device_ends_with_its_unborn():
    e = engine(max_num_batched_tokens=64)
    family = e.add(request(prompt_len=10, n=8, seed=1, max_tokens=3))
    for _ in range(2):
        e.runner.fail_next = "inside"
        with pytest.raises(InjectedError):
            e.step()
    assert [sequence.finish_reason for sequence in family] == [FinishReason.ABORT] * 8
    assert not e.has_work
    e.audit()


def test_prompt_log_probabilities_are_scored_once_for_the_family():
    e = engine()
    family = e.add(request(prompt_len=12, n=3, seed=1, max_tokens=2, prompt_logprobs=True, ignore_eos=True))
    while e.has_work:
        e.step()
    assert all(len(sequence.prompt_logprobs) == 12 for sequence in family)
    nothing_more = e.add(request("s", prompt_len=12, n=2, max_tokens=0, prompt_logprobs=True))
    while e.has_work:
        e.step()
    assert [sequence.finish_reason for sequence in nothing_more] == [FinishReason.LENGTH] * 2


PARAMS = SamplingParams(seed=11, max_tokens=20, top_p=0.9, temperature=0.8, n=6, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"max_num_seqs": 2},
        {"num_pages": 19, "preemption": "swap", "num_host_pages": 100},
        {"num_pages": 19, "preemption": "recompute"},
        {"prefix_cache": False, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_a_family_on_the_real_device_is_the_same_however_it_is_run(knobs):
    prompt = [(7 * i) % 90 + 1 for i in range(30)]
    with tiny_llm(tiny_config(eos_ids=()), debug=True) as llm:
        ample = [out.token_ids for out in llm.generate([prompt], PARAMS, progress=False)[0].outputs]
        again = llm.generate([prompt], PARAMS, progress=False)[0]
        assert [out.token_ids for out in again.outputs] == ample
        assert again.num_cached_tokens == 28
    with tiny_llm(tiny_config(eos_ids=()), debug=True, **knobs) as llm:
        assert [out.token_ids for out in llm.generate([prompt], PARAMS, progress=False)[0].outputs] == ample
        stats = llm.engine.stats()
        assert (stats.held_pages, stats.compiles_after_warmup) == (0, 0)
        if "num_pages" in knobs:
            assert stats.preemptions > 0
