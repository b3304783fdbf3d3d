"""Protects what a client reads while tokens arrive: whole characters, nothing at or after a stop, nothing revised."""

import time
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

BYTES = [bytes([byte]) for byte in range(256)]
SPECIAL_ID = 256
WORDS = [b"ab", b"ba", b"aab", b"\xe4\xbd", b"\xa0", b"\x8d\xa8", b" you", b"\xf0\x9f\x91", b"\xff\xfe", b"", b"\r\n"]


def make_tokenizer(strips_leading_space: bool = False) -> Tokenizer:
    """Every byte is a token, so random ids make every valid and invalid byte string; 256 is special."""
    return Tokenizer(
        tokenizers.Tokenizer(tokenizers.models.BPE()),
        [*BYTES, b"<|special|>", *WORDS],
        special_ids=frozenset({SPECIAL_ID}),
        bos_id=None,
        eos_ids=frozenset(),
        strips_leading_space=strips_leading_space,
        chat_template=None,
        special_tokens={},
    )


TOKENIZER = make_tokenizer()
SENTENCEPIECE = make_tokenizer(strips_leading_space=True)
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 1))  # one id more than there are tokens
ab_ids = st.lists(st.sampled_from([ord("a"), ord("b"), 257, 258, 259]), max_size=30)
ab_stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def stream(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Deltas of one token at a time, without the last."""
    deltas = []
    for num_ids in range(1, len(ids) + 1):
        detokenizer.advance(ids[:num_ids])
        deltas.append(detokenizer.take())
    return deltas


def longest_suffix_in(sequence: Sequence, patterns: Sequence[Sequence], proper: bool) -> int:
    """Length of the longest suffix of `sequence` that begins a pattern: the slow and obvious way."""
    return max(
        num
        for num in range(len(sequence) + 1)
        if num == 0
        or any(
            tuple(pattern[:num]) == tuple(sequence[len(sequence) - num :]) and num + proper <= len(pattern)
            for pattern in patterns
        )
    )


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Text before the stop that is complete first (the longest of those that end together), None without one."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return None


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(any_ids)
def test_deltas_add_up_to_decode(tokenizer: Tokenizer, ids: list[int]):
    detokenizer = Detokenizer(tokenizer)
    deltas = [*stream(detokenizer, ids), detokenizer.finish()]
    assert "".join(deltas) == tokenizer.decode(ids)
    assert detokenizer.text == tokenizer.decode(ids)


@given(st.text())
def test_never_half_a_character(text: str):
    detokenizer = Detokenizer(TOKENIZER)
    so_far = ""
    for delta in stream(detokenizer, list(text.encode())):
        so_far += delta
        assert text.startswith(so_far)
    assert so_far + detokenizer.finish() == text


def test_a_character_appears_with_its_last_byte():
    assert stream(Detokenizer(TOKENIZER), list("é👍".encode())) == ["", "é", "", "", "", "👍"]


def test_an_incomplete_tail_becomes_the_replacement_character():
    detokenizer = Detokenizer(TOKENIZER)
    ids = [*b"ok", 0xF0, 0x9F]
    assert stream(detokenizer, ids) == ["o", "k", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == TOKENIZER.decode(ids)


def test_special_tokens_have_no_text_even_inside_a_character():
    detokenizer = Detokenizer(TOKENIZER)
    assert stream(detokenizer, [0xC3, SPECIAL_ID, 0xA9]) == ["", "", "é"]


def test_special_tokens_have_their_names_where_they_are_not_skipped():
    detokenizer = Detokenizer(TOKENIZER, ["!"], skip_special=False)
    ids = [ord("a"), SPECIAL_ID, ord("b"), SPECIAL_ID]
    assert "".join(stream(detokenizer, ids)) + detokenizer.finish(drop_tokens=1) == "a<|special|>b<|special|>"
    again = Detokenizer(TOKENIZER, skip_special=False)
    again.advance(ids)
    assert again.finish(drop_tokens=1) == "a<|special|>b"


@given(ab_ids, ab_stops)
def test_an_included_stop_string_is_the_end_of_the_text(ids: list[int], stops: list[str]):
    without, included = Detokenizer(TOKENIZER, stops), Detokenizer(TOKENIZER, stops, include_stop=True)
    assert without.advance(ids) == included.advance(ids)
    text, whole = without.finish(), included.finish()
    assert whole.startswith(text)
    if first_stop(TOKENIZER.decode(ids), stops) is None:
        assert whole == text
    else:
        assert whole.removeprefix(text) in stops


def test_only_the_first_space_is_stripped():
    detokenizer = Detokenizer(SENTENCEPIECE)
    ids = [SPECIAL_ID, *b"  a b"]
    assert "".join(stream(detokenizer, ids)) == " a b" == SENTENCEPIECE.decode(ids)


@given(
    any_ids | ab_ids,
    any_ids | ab_ids,
    any_ids | ab_ids,
    ab_stops,
    st.lists(st.lists(st.sampled_from([97, 98, 257]), min_size=1, max_size=4).map(tuple), max_size=2),
    st.integers(0, 12),
    st.booleans(),
    st.booleans(),
)
def test_a_fork_goes_on_as_if_it_had_read_everything_alone(
    before: list[int], ours: list[int], theirs: list[int], stops, sequences, min_tokens, is_taken, include_stop
):
    """Whatever is under way at the fork: half a character, half a stop string, half a stop id sequence."""

    def fresh() -> Detokenizer:
        return Detokenizer(TOKENIZER, stops, sequences, min_tokens, include_stop=include_stop)

    parent = fresh()
    taken = [*stream(parent, before), parent.take()] if is_taken else [str(parent.advance(before))[:0]]
    child = parent.fork()
    for detokenizer, ids, deltas in ((parent, before + ours, taken), (child, before + theirs, [])):
        alone = fresh()
        assert detokenizer.advance(ids) == alone.advance(ids)
        assert detokenizer.num_tokens == alone.num_tokens
        longest = min(max([1, *map(len, sequences)]), detokenizer.num_tokens)
        drop = 0 if detokenizer is parent and is_taken else longest
        assert "".join([*deltas, detokenizer.take(), detokenizer.finish(drop)]) == alone.take() + alone.finish(drop)


def test_who_reads_a_fork_has_read_nothing_yet():
    parent = Detokenizer(TOKENIZER)
    parent.advance(list(b"abc"))
    assert parent.take() == "abc"
    child = parent.fork()
    assert [child.take(), child.take(), child.text] == ["abc", "", "abc"]
    child.advance(list(b"abcd"))
    assert [child.take(), child.text, parent.take(), parent.text] == ["d", "abcd", "", "abc"]


def test_calling_twice_is_free():
    detokenizer = Detokenizer(TOKENIZER)
    ids = list(b"abc")
    assert [detokenizer.advance(ids), detokenizer.take()] == [False, "abc"]
    assert [detokenizer.advance(ids), detokenizer.take()] == [False, ""]
    assert [detokenizer.finish(), detokenizer.num_tokens] == ["", 3]


@given(ab_ids, ab_stops, st.lists(st.tuples(st.integers(1, 5), st.booleans())))
def test_stop_strings(ids: list[int], stops: list[str], portions: list[tuple[int, bool]]):
    """Against brute force, with tokens arriving in any portions and taken or not."""
    detokenizer = Detokenizer(TOKENIZER, stops)
    read, num_ids = "", 0
    for num_new, takes in [*portions, (len(ids), False)]:
        num_ids += num_new
        so_far = TOKENIZER.decode(ids[:num_ids])
        before_stop = first_stop(so_far, stops)
        assert detokenizer.advance(ids[:num_ids]) == (before_stop is not None)
        if takes:
            read += detokenizer.take()
            # What cannot begin a stop is out at once, and nothing else.
            held = longest_suffix_in(so_far, stops, proper=True)
            assert read == (so_far[: len(so_far) - held] if before_stop is None else before_stop)
    before_stop = first_stop(TOKENIZER.decode(ids), stops)
    read += detokenizer.finish()
    assert read == detokenizer.text == (TOKENIZER.decode(ids) if before_stop is None else before_stop)


def test_a_stop_string_across_tokens_and_characters():
    detokenizer = Detokenizer(TOKENIZER, ["</ä>"])
    ids = list("x</b></ä>y".encode())
    assert "".join(stream(detokenizer, ids)) == "x</b>"
    assert detokenizer.advance(ids)
    assert detokenizer.num_tokens == len("x</b></ä>".encode())
    assert detokenizer.finish() == ""


def test_the_stop_that_is_complete_first_wins_however_the_text_is_cut():
    for ids in (list(b"abxab"), [257, *b"x", 257]):
        detokenizer = Detokenizer(TOKENIZER, ["bxab", "x"])
        assert detokenizer.advance(ids)
        assert detokenizer.finish() == "ab"


def test_a_stop_string_made_by_the_flush_of_an_incomplete_character():
    detokenizer = Detokenizer(TOKENIZER, ["\ufffd"])
    assert not detokenizer.advance([*b"a", 0xC3])
    assert detokenizer.finish() == "a"


@given(ab_ids, st.lists(st.lists(st.sampled_from([97, 98, 257]), min_size=1, max_size=4).map(tuple), max_size=3))
def test_tokens_that_may_begin_a_stop_sequence_are_held_back(ids: list[int], sequences: list[tuple[int, ...]]):
    detokenizer = Detokenizer(TOKENIZER, stop_sequences=sequences)
    read = ""
    for num_ids in range(1, len(ids) + 1):
        detokenizer.advance(ids[:num_ids])
        read += detokenizer.take()
        held = longest_suffix_in(ids[:num_ids], sequences, proper=False)
        assert read == TOKENIZER.decode(ids[: num_ids - held])
        matches = [len(s) for s in sequences if tuple(ids[:num_ids][-len(s) :]) == s]
        if matches:  # the engine stops on any of them
            read += detokenizer.finish(drop_tokens=matches[0])
            assert read == TOKENIZER.decode(ids[: num_ids - matches[0]])
            return
    assert read + detokenizer.finish() == TOKENIZER.decode(ids)


def test_a_stop_string_inside_held_back_tokens_is_seen_at_once():
    detokenizer = Detokenizer(TOKENIZER, ["b"], [(ord("a"), ord("b"), ord("c"))])
    assert not detokenizer.advance(list(b"a"))
    assert detokenizer.take() == ""
    assert detokenizer.advance(list(b"ab"))
    assert detokenizer.finish() == "a"


def test_dropping_a_stop_token_keeps_the_incomplete_character_before_it():
    ids = [*b"a", 0xC3, *b"z"]
    detokenizer = Detokenizer(TOKENIZER, stop_sequences=[(ord("z"),)])
    assert stream(detokenizer, ids) == ["a", "", ""]
    assert detokenizer.finish(drop_tokens=1) == "\ufffd"
    assert detokenizer.text == TOKENIZER.decode(ids[:-1])


def test_dropping_a_stop_token_keeps_the_stop_string_that_began_before_it():
    detokenizer = Detokenizer(TOKENIZER, ["ab"], [(ord("b"),)])
    assert detokenizer.advance(list(b"xab"))
    assert detokenizer.finish(drop_tokens=1) == "x"


def test_dropping_the_whole_stop_string_leaves_the_text_before_it():
    detokenizer = Detokenizer(TOKENIZER, ["b"], [(ord("b"),)])
    assert detokenizer.advance(list(b"xab"))
    assert detokenizer.finish(drop_tokens=1) == "xa"


def test_taken_text_is_never_taken_back():
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.advance(list(b"ab"))
    assert [detokenizer.take(), detokenizer.finish(drop_tokens=1), detokenizer.text] == ["ab", "", "ab"]


@pytest.mark.parametrize("drop_tokens", [-1, 2])
def test_dropping_more_than_a_stop_is_an_error(drop_tokens: int):
    detokenizer = Detokenizer(TOKENIZER)
    detokenizer.advance(list(b"abc"))
    with pytest.raises(ValueError, match=r"drop_tokens must be 0\.\.1"):
        detokenizer.finish(drop_tokens)


def test_empty_stops_are_errors_that_name_the_field():
    with pytest.raises(ValueError, match=r"stop_strings\[1\]"):
        Detokenizer(TOKENIZER, ["a", ""])
    with pytest.raises(ValueError, match=r"stop_sequences\[0\]"):
        Detokenizer(TOKENIZER, stop_sequences=[()])


@pytest.mark.alone
def test_cost_does_not_grow_with_the_text_or_the_stops():
    """Stops that always nearly match: four times the tokens and the stops cost four times as much, not sixteen."""

    def seconds(length: int) -> float:
        detokenizer = Detokenizer(TOKENIZER, ["a" * length + "b"], [(*b"a" * length, ord("c"))])
        ids = list(b"a" * 3 * length)
        portions = [ids[:num_ids] for num_ids in range(0, len(ids), length // 100)]
        num_read, started = 0, time.thread_time()
        for portion in portions:
            detokenizer.advance(portion)
            num_read += len(detokenizer.take())
        detokenizer.advance(ids)
        num_read += len(detokenizer.finish())
        spent = time.thread_time() - started  # of this thread: whoever else is on the machine does not count
        assert num_read == len(ids)
        return spent

    few, many = min(seconds(5_000) for _ in range(3)), min(seconds(20_000) for _ in range(3))
    assert many < 10 * few
