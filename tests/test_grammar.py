"""Masks of a form against all tokens tried one by one, and forms that are meant to do harm."""

import gc
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.field_error import FieldError
from quire.structured import compiler as grammar_module
from quire.structured import matcher as matcher_module
from quire.structured import sandbox
from quire.structured.compiler import GrammarCompiler, to_llguidance
from quire.structured.form import Structured
from quire.structured.matcher import Vocabulary, start
from quire.structured.sandbox import MAX_BYTES
from quire.testing import bits
from tests.tiny import VOCAB
from tests.words import EOS, PIECES, SPECIAL, tiny_tokenizer

TEXT_IDS = [i for i, piece in enumerate(PIECES) if i not in (EOS, SPECIAL)]
COMPILER = GrammarCompiler(tiny_tokenizer(), VOCAB, frozenset({EOS}))


def id_of(text: str) -> int:
    return PIECES.index(text.encode())


def allowed(matcher) -> set[int]:
    words = matcher.mask()
    return {i for i in range(32 * len(words)) if bits(words) >> i & 1}


def walk(
    compiler: GrammarCompiler,
    form: Structured,
    choose: random.Random,
    most: int = 200,
    *,
    must: bool = True,
    trusted: bool = False,
) -> tuple[bytes, bool]:
    """A text that the masks allow, drawn at random, and whether it is whole. The form `must` not fail."""
    matcher, ids = compiler.compile(form, trusted=trusted), []
    while len(ids) < most:
        able = sorted(allowed(matcher))
        if matcher.accepts and (not able or choose.random() < 0.3):
            return b"".join(PIECES[i] for i in ids), True
        assert able or not must, "neither an end nor a token"
        ids.append(choose.choice(able or [EOS]))
        if not matcher.advance(ids):
            assert not must
            break
    return b"".join(PIECES[i] for i in ids), False


choices = st.lists(st.text("ab12 ", min_size=1, max_size=6), min_size=1, max_size=6)


@given(choices=choices, choose=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_a_mask_allows_what_some_choice_goes_on_with(choices, choose):
    """Where several texts can follow, exactly the tokens that lead to one; where one can, a token of it."""
    matcher, ids, text = COMPILER.compile(Structured(choice=choices)), [], ""
    while True:
        left = [choice[len(text) :] for choice in choices if choice.startswith(text)]
        assert matcher.accepts == ("" in left)
        able = {i for i in TEXT_IDS if any(rest.startswith(PIECES[i].decode()) for rest in left)}
        mask = allowed(matcher)
        assert mask <= able
        assert bool(mask) == bool(able)
        if "" in left or len({rest[0] for rest in left}) > 1:
            assert mask == able
        if not mask:
            assert text in choices
            return
        ids.append(choose.choice(sorted(mask)))
        text += PIECES[ids[-1]].decode()
        assert matcher.advance(ids)


FORMS = {
    "regex": (Structured(regex=r"[ab]{2,5}(12|\.[0-9]+)?"), lambda t: re.fullmatch(r"[ab]{2,5}(12|\.[0-9]+)?", t)),
    "slash": (Structured(regex="a/b\nc+"), lambda t: re.fullmatch("a/b\nc+", t)),
    "choice": (Structured(choice=["yes", "no", 'a "b"\n\\']), lambda t: t in ("yes", "no", 'a "b"\n\\')),
    "grammar": (Structured(grammar='start: "a" start "b" | "12"'), lambda t: re.fullmatch("(a*)12(b*)", t)),
    "any object": (Structured(json_object=True), lambda t: isinstance(json.loads(t), dict)),
    "schema": (
        Structured(
            json_schema={
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
        lambda t: json.loads(t)["a"] in range(100) and json.loads(t)["b"] in "xy" and len(json.loads(t)) == 2,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_whatever_is_drawn_is_of_the_form(name):
    form, is_right = FORMS[name]
    num_whole = 0
    for seed in range(40):
        text, is_whole = walk(COMPILER, form, random.Random(seed))
        assert not is_whole or is_right(text.decode()), text
        num_whole += is_whole
    assert num_whole > 10


@pytest.mark.parametrize("kind", ["schema", "any object"])
@pytest.mark.parametrize("compact", [True, False])
def test_whitespace_between_the_parts_of_json_is_what_compact_says(kind, compact):
    """Whatever `x-guidance` a schema has inside."""
    inner = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}
    hidden = inner | {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": "ab"}}
    schema = {"type": "object", "properties": {"a": hidden}, "required": ["a"], "additionalProperties": False}
    given = {"json_schema": schema} if kind == "schema" else {"json_object": True}
    texts = [walk(COMPILER, Structured(**given, compact=compact), random.Random(seed)) for seed in range(40)]
    whole = [text.decode() for text, is_whole in texts if is_whole]
    assert len(whole) > 10
    blanks = 0
    for text in whole:
        value = json.loads(text)
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
        blanks += len(outside) - len("".join(outside.split()))
        assert kind != "schema" or set(value["a"]) <= {1, 2}
    assert bool(blanks) != compact


def test_a_copy_goes_on_by_itself():
    first = COMPILER.compile(Structured(regex="a(b|12)c"))
    assert first.advance([id_of("a")])
    second = first.copy()
    assert allowed(first) == allowed(second) == {id_of("b"), id_of("1"), id_of("12")}
    assert first.advance([id_of("a"), id_of("12")])
    assert (allowed(first), allowed(second)) == ({id_of("c")}, {id_of("b"), id_of("1"), id_of("12")})
    assert second.advance([id_of("a"), id_of("b")])
    assert not COMPILER.compile(Structured(regex="a(b|12)c")).accepts, "another request begins at the beginning"


def test_a_token_that_may_not_be_there_fails_that_matcher_and_no_other(caplog):
    bad, good = (COMPILER.compile(Structured(regex="a{3}")) for _ in range(2))
    assert not bad.advance([id_of("b")])
    assert (allowed(bad), bad.accepts) == (set(), False)
    assert not bad.advance([id_of("b"), id_of("a")])
    assert good.advance([id_of("a")] * 3)
    assert good.accepts
    assert "a grammar failed after 0 tokens" in caplog.text
    assert "state" not in caplog.text


@pytest.mark.parametrize("end", ["eos", "no end token"])
@pytest.mark.parametrize("vocab_size", [VOCAB, 40, 96, 128, 129, 200])
def test_the_vocabulary_is_the_models_whatever_the_tokenizer_has(vocab_size, end):
    eos_ids = frozenset({EOS}) if end == "eos" else frozenset()
    compiler = GrammarCompiler(tiny_tokenizer(), vocab_size, eos_ids)
    matcher = compiler.compile(Structured(regex=".*"), trusted=True)
    assert len(matcher.mask()) == -(-vocab_size // 32)
    assert allowed(matcher) == {i for i in TEXT_IDS if i < vocab_size and PIECES[i] != b"\n"}
    assert matcher.accepts


def test_special_tokens_are_named_in_a_grammar_and_are_never_text():
    matcher = COMPILER.compile(Structured(grammar='start: "a" <special> "b"'))
    assert matcher.advance([id_of("a")])
    assert allowed(matcher) == {SPECIAL}
    text = COMPILER.compile(Structured(choice=["<special>b"]))
    ids = []
    while able := sorted(allowed(text)):
        ids.append(able[0])
        assert text.advance(ids)
    assert SPECIAL not in ids
    assert b"".join(PIECES[i] for i in ids) == b"<special>b"[: len(ids)]


def test_forced_text_is_put_into_the_models_own_tokens_or_into_any_that_spell_it():
    encode = tiny_tokenizer().encode
    own = Vocabulary(PIECES, [SPECIAL], [EOS], encode)
    assert own("abab") == encode("abab")
    spaced = Vocabulary(PIECES, [SPECIAL], [EOS], lambda text: encode(" " + text))
    assert spaced("abab") == [id_of("ab"), id_of("ab")]
    special = Vocabulary(PIECES, [SPECIAL], [EOS], lambda text: [SPECIAL])
    assert [PIECES[i] for i in special("yes")] == [b"ye", b"s"]
    long = own("ab" * 500)
    assert b"".join(PIECES[i] for i in long) == b"ab" * 32, "enough for the first to be certain"
    assert own("ä") == [], "no token has these bytes"


def many_words(num_words: int, longest: int = 20) -> Vocabulary:
    """The characters of ASCII, and random texts of some of them, most of them words."""
    choose, tokens = random.Random(0), [b"<eos>", *(bytes([i]) for i in range(32, 127))]
    for alphabet in itertools.islice(itertools.cycle(["ab", "ab c", "abAB ", "ab AB.", 'ab"\\é']), num_words):
        tokens.append("".join(choose.choices(alphabet, k=choose.randint(2, longest))).encode())
    return Vocabulary(tokens, [], [0])


ALLOWS_MUCH = {
    "words": {"regex": "[a-z ]{1,60}"},
    "letters": {"regex": "([a-z]{3,18} )+"},
    "names": {"regex": "[A-Z][a-z]{1,15}( [A-Z][a-z]{1,20}){1,9}"},
    "prose": {"regex": "[A-Za-z ,.]{17,400}"},
    "all but two words": {"grammar": 'start: TEXT\nTEXT: /[a-z ]{1,40}/ & ~("ab" | "ba ba")'},
    "strings": {"json_schema": {"items": {"type": "string", "maxLength": 20}, "type": "array", "minItems": 3}},
    "patterns": {"json_schema": {"items": {"type": "string", "pattern": "^[a-zA-Z ]{2,30}$"}, "type": "array"}},
}


@pytest.mark.parametrize("name", ALLOWS_MUCH)
def test_kinds_of_text_that_are_allowed_as_one_set_change_no_mask(name):
    """Against a library that looks at each token."""
    vocabulary, text = many_words(4000), to_llguidance(Structured(**ALLOWS_MUCH[name]))
    one_by_one = llguidance.LLTokenizer(vocabulary, eos_token=0, slices=[])  # pyright: ignore
    firsts = [start(library, text) for library in (vocabulary.as_library(), one_by_one)]
    choose, num_masks = random.Random(0), 0
    for _ in range(8):
        matcher, other = (first.deep_copy() for first in firsts)
        while not matcher.is_stopped() and num_masks < 300:
            mask = matcher.compute_bitmask()
            assert mask == other.compute_bitmask()
            able = [i for i in range(len(vocabulary.tokens)) if mask[i >> 3] >> (i & 7) & 1]
            token_id = choose.choice(able)
            assert matcher.consume_token(token_id)
            assert other.consume_token(token_id)
            num_masks += 1
        assert not matcher.is_error()
    assert num_masks > 20


@pytest.mark.alone
def test_a_mask_that_allows_all_words_looks_at_few_tokens():
    vocabulary, seconds = many_words(50_000, longest=12), []
    one_by_one = llguidance.LLTokenizer(vocabulary, eos_token=0, slices=[])  # pyright: ignore
    for library in (vocabulary.as_library(), one_by_one):
        matcher, times = start(library, "start: /[a-z ]{4000}/"), []
        for _ in range(40):
            assert matcher.consume_token(vocabulary.tokens.index(b"a"))
            begin = time.thread_time()
            matcher.compute_bitmask()
            times.append(time.thread_time() - begin)
        seconds.append(statistics.median(times))
    print(f"{1e6 * seconds[0]:.0f} us, and {1e6 * seconds[1]:.0f} us with a look at each")
    assert seconds[0] < seconds[1] / 2


def test_forced_text_that_comes_again_is_not_encoded_again():
    """Keys come again in every row and every item, and each token of them asks for what is left of the key."""
    encode, asked = tiny_tokenizer().encode, []

    def counted(text: str) -> list[int]:
        asked.append(text)
        return encode(text)

    first = start(Vocabulary(PIECES, [SPECIAL], [EOS], counted).as_library(), r'start: /([01]"abba": ){3}/')
    for _ in range(3):
        matcher, text = first.deep_copy(), b""
        while not matcher.is_accepting():
            mask = matcher.compute_bitmask()
            token_id = next(i for i in TEXT_IDS if mask[i >> 3] >> (i & 7) & 1)
            text += PIECES[token_id]
            assert matcher.consume_token(token_id)
        assert text == b'0"abba": ' * 3
    assert len(asked) == len(set(asked)) > 3


def test_compiled_forms_are_few_and_failed_ones_are_forgotten(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 3)
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    forms = [Structured(regex=f"a{i}") for i in range(5)]
    for form in forms:
        matcher = compiler.compile(form, trusted=True)
    assert [key for key, _ in compiler._kept] == forms[2:]
    compiler.compile(forms[2], trusted=True)
    compiler.compile(forms[0], trusted=True)
    assert [key for key, _ in compiler._kept] == [forms[4], forms[2], forms[0]], "the one least recently used went"
    assert not matcher.advance([id_of("b")])
    assert [key for key, _ in compiler._kept] == [forms[2], forms[0]]
    compiler.compile(forms[0], "another tenant", trusted=True)
    assert len(compiler._kept) == 3


def test_a_form_that_is_too_slow_fails(monkeypatch):
    monkeypatch.setattr(matcher_module, "_MASK_SECONDS", 0.0)
    monkeypatch.setattr(matcher_module, "_GRACE_SECONDS", 0.002)
    matcher, ids = COMPILER.compile(Structured(regex="a{10000}"), trusted=True), []
    for _ in range(10_000):
        ids.append(id_of("a"))
        matcher.mask()
        if not matcher.advance(ids):
            return
    pytest.fail("10,000 masks within two milliseconds")


def test_threads_may_compile_at_once():
    compiler, errors = GrammarCompiler(tiny_tokenizer(), VOCAB, frozenset({EOS})), []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                walk(compiler, Structured(regex=f"a{{{(seed + i) % 7 + 1}}}b"), random.Random(seed), trusted=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    for form in (Structured(regex="a"), Structured(json_object=True)):
        with pytest.raises(
            ValueError, match=r"structured\.\w+ needs the library llguidance: pip install 'quire-llm\[structured\]'"
        ):
            compiler.compile(form)


MALFORMED = {
    "unclosed group": {"regex": "(ab"},
    "look-ahead": {"regex": "(?=a)b"},
    "back reference": {"regex": r"(a)\1"},
    "no such type": {"json_schema": {"type": "nothing"}},
    "properties as a list": {"json_schema": {"properties": []}},
    "never": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    "elsewhere": {"json_schema": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "a file": {"json_schema": {"$ref": "file:///etc/passwd"}},
    "itself": {"json_schema": {"$ref": "#"}},
    "no start": {"grammar": 'other: "a"'},
    "GBNF": {"grammar": 'root ::= "a"'},
    "not Lark": {"grammar": '{"grammars": [{"json_schema": {}}]}'},
    "empty": {"grammar": ""},
    "endless": {"grammar": "start: start"},
    "not in the vocabulary": {"regex": "ä"},
}


@pytest.mark.parametrize("trusted", [False, True], ids=["tried first", "trusted"])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_form_that_is_none_is_refused_by_the_name_of_its_field(name, trusted):
    form = Structured(name="response_format", **MALFORMED[name])
    with pytest.raises(ValueError, match=rf"^response_format\.{form.kind} is refused: ") as caught:
        COMPILER.compile(form, trusted=trusted)
    assert len(str(caught.value)) < 600
    assert "/rust" not in str(caught.value)
    assert ".rs" not in str(caught.value)


def nested(depth: int, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def definitions(count: int, link) -> dict:
    """A schema that goes from definition to definition."""
    links = {str(i): link({"$ref": f"#/$defs/{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/0", "$defs": links | {str(count): {"type": "string"}}}


LETTERS = "abcdefghijklmnopqrstuvwxyz"
HOSTILE = {
    "30,000 parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "30,000 parentheses in Lark": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "30,000 brackets": {"json_schema": '{"enum": ' + "[" * 30_000 + "]" * 30_000 + "}"},
    "(a+)+b": {"regex": "(a+)+b"},
    "repeat a million": {"regex": "(a{1000}){1000}"},
    "repeat repeats": {"regex": "(((((((a{0,50}){0,50}){0,50}b?){0,50}){0,50}){0,50}){0,50})"},
    "optional": {"regex": "a?" * 20_000 + "a" * 20_000},
    "optional anything": {"regex": ".?" * 30_000},
    "all but": {"regex": "".join(f"[^{LETTERS[i % 26]}]*" for i in range(9000))},
    "exponential states": {"regex": ".*a.{200}"},
    "many exponential states": {"regex": "|".join(f".*{LETTERS[i % 26]}.{{{i}}}b" for i in range(200))},
    "a huge enum": {"json_schema": {"enum": [f"value{i}" for i in range(4500)]}},
    "a huge choice": {"choice": [f"value{i}" for i in range(6000)]},
    "a long choice": {"choice": ["ab" * 32_000]},
    "rules in a row": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'},
    "terms in a row": {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(4000)) + 'R4000: "a"'},
    "doubled terms": {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"'},
    "intersections": {
        "grammar": "start: A0\n" + "".join(f"A{i}: A{i + 1} & /.*a.{{{i % 50}}}/\n" for i in range(130)) + "A130: /.*/"
    },
    "ambiguous": {"grammar": 'start: start start | start start start | "a" | ""'},
    "very ambiguous": {"grammar": "start: " + " | ".join("start " * i for i in range(2, 30)) + ' | "a" | ""'},
    "counted rules": {"grammar": 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"{0,1000}'},
    "definitions in a row": {"json_schema": definitions(1400, lambda next_: {"items": next_})},
    "doubled definitions": {"json_schema": definitions(40, lambda next_: {"allOf": [next_, next_]})},
    "recursive": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}},
    "all of many patterns": {"json_schema": {"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(150)]}},
    "many pattern properties": {"json_schema": {"patternProperties": {f"^p{i}[a-z]+$": {} for i in range(1500)}}},
    "many properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(4000)}}},
    "a multiple of much": {"json_schema": {"items": {"type": "integer", "multipleOf": 99_991}}},
    "multiples of many": {
        "json_schema": {"prefixItems": [{"type": "integer", "multipleOf": 9000 + i} for i in range(90)]}
    },
    "huge bounds": {
        "json_schema": {"type": "array", "minItems": 2**62, "items": {"type": "string", "maxLength": 2**62}}
    },
    "deep": {"json_schema": nested(60, lambda inner: {"items": inner}, {})},
}

TRY_ALL = """
import json, random, resource, sys, time
from quire.structured.sandbox import MAX_BYTES, MAX_SECONDS
from tests.test_grammar import HOSTILE, COMPILER, Structured, walk
memory = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
COMPILER.compile(Structured(regex="a"))
for name, fields in HOSTILE.items():
    before, begin, refused, slowest = memory(), time.monotonic(), None, 0.0
    try:
        form = Structured(**fields)
        COMPILER.compile(form)
    except ValueError as error:
        refused = str(error)[-100:]
    seconds = time.monotonic() - begin
    if refused is None:
        for seed in range(3):
            begin = time.thread_time()
            text, _ = walk(COMPILER, form, random.Random(seed), most=60, must=False)
            slowest = max(slowest, time.thread_time() - begin)
    print(json.dumps([name, refused, seconds, slowest, memory() - before]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_hostile_forms_take_bounded_time_and_memory_and_end_nothing():
    """In a process of its own all the same: should it end, that is one failure and not the end of the tests."""
    root = Path(__file__).resolve().parents[1]
    out = subprocess.run([sys.executable, "-c", TRY_ALL], capture_output=True, text=True, cwd=root, check=False)
    results = [json.loads(line) for line in out.stdout.splitlines()]
    for name, refused, seconds, slowest, num_bytes in results:
        print(f"{name:28} {seconds:5.2f} s, {slowest:.3f} s for 60 tokens, {num_bytes >> 20:4} MiB  {refused or ''}")
    assert [name for name, *_ in results] == list(HOSTILE), out.stderr[-2000:]
    assert out.returncode == 0
    for name, _, seconds, slowest, num_bytes in results:
        assert seconds < 60, name  # one to try and one to compile, on a machine that does other things
        assert slowest < 5, name
        assert num_bytes < 2 * MAX_BYTES, name
    assert sum(refused is not None for _, refused, *_ in results) > 10
    assert sum(refused is None for _, refused, *_ in results) > 8


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), VOCAB, frozenset({EOS}))


def test_a_trial_that_was_ended_is_begun_anew():
    compiler = new_compiler()
    compiler.compile(Structured(regex="a"))
    (trial,) = compiler._trial._idle
    trial._process.kill()
    trial._process.wait()
    compiler.compile(Structured(regex="b"))
    (other,) = compiler._trial._idle
    assert other is not trial
    process = other._process
    del compiler, trial, other
    gc.collect()
    assert process.returncode is not None, "it goes with the compiler"


def test_a_trial_that_another_thread_takes_first_is_not_missed():
    class Emptied(list):
        """Another thread takes the last process between a look and the pop."""

        def __bool__(self) -> bool:
            return True

    compiler = new_compiler()
    compiler._trial._idle = Emptied()
    compiler.compile(Structured(regex="[ab]+"))
    assert len(compiler._trial._idle) == 1


def test_a_trial_that_hangs_is_ended_and_begun_anew(monkeypatch):
    compiler = new_compiler()
    compiler.compile(Structured(regex="a"))
    (trial,) = compiler._trial._idle
    os.kill(trial._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "ANSWER_SECONDS", 0.2)
        with pytest.raises(FieldError, match="could not be tried in time"):
            compiler.compile(Structured(regex="b"))
    assert trial._process.returncode is not None
    compiler.compile(Structured(regex="b"))  # it is not to blame, and was not remembered as refused


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_trial_has_no_secrets_in_its_environment(monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "a-key-in-the-environment")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    compiler = new_compiler()
    compiler.compile(Structured(regex="a"))
    (trial,) = compiler._trial._idle
    environment = Path(f"/proc/{trial._process.pid}/environ").read_bytes()
    assert b"OPENBLAS_NUM_THREADS=1" in environment
    assert b"a-key-in-the-environment" not in environment
    assert b"hf_secret" not in environment


def test_a_trial_that_does_not_read_is_ended_too(monkeypatch):
    compiler = new_compiler()
    compiler.compile(Structured(regex="a"))
    (trial,) = compiler._trial._idle
    os.kill(trial._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(sandbox, "ANSWER_SECONDS", 0.2)
    verdict = compiler._trial.run("x" * 1_000_000)  # more than a pipe holds
    assert verdict == ("it could not be tried in time", False)
    assert trial._process.returncode is not None


@pytest.mark.parametrize(("slow_steps", "is_refused"), [((), False), ((2,), False), ((2, 5), True)])
def test_a_form_is_refused_if_more_than_one_of_its_masks_is_slow(monkeypatch, slow_steps, is_refused):
    """One may be slow by chance, on a busy machine."""
    calls, clock = itertools.count(), [0.0]

    def process_time() -> float:
        step, is_end = divmod(next(calls), 2)
        clock[0] += 1.0 if is_end and step in slow_steps else 0.0
        return clock[0]

    monkeypatch.setattr(sandbox.time, "process_time", process_time)
    vocabulary = Vocabulary(PIECES, [SPECIAL], [EOS])
    problem = sandbox._try(vocabulary.as_library(), "start: /[a-z]{40}/")
    assert problem == ("some of its masks take more than 50 ms" if is_refused else None)


def test_threads_that_try_forms_do_not_wait_for_each_other(monkeypatch):
    """One is stopped in the middle of a form; another thread's form is tried all the same."""
    monkeypatch.setattr(sandbox, "ANSWER_SECONDS", 600)
    compiler = new_compiler()
    compiler.compile(Structured(regex="a"))
    (trial,) = compiler._trial._idle
    os.kill(trial._process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        stuck = threads.submit(compiler.compile, Structured(regex="b"))
        while compiler._trial._idle:
            time.sleep(0.001)
        compiler.compile(Structured(regex="c"))
        assert not stuck.done()
        os.kill(trial._process.pid, signal.SIGCONT)
        stuck.result()


def test_a_refused_form_is_refused_again_without_another_trial(monkeypatch):
    compiler = new_compiler()
    form, problems = Structured(regex="(", name="response_format"), []
    for salt in ("", "", "other"):
        with pytest.raises(FieldError, match=r"^response_format.regex is refused: ") as caught:
            compiler.compile(form, salt)
        problems.append(str(caught.value))
        for trial in compiler._trial._idle:  # a second trial would begin another process
            trial._process.kill()
        if salt == "":
            (first,) = compiler._trial._idle
    assert compiler._trial._idle != [first], "another salt finds out for itself"
    assert len(set(problems)) == 1
    with pytest.raises(FieldError, match=r"^structured.regex is refused: "):
        compiler.compile(Structured(regex="("))  # named as its caller names it
    monkeypatch.setattr(grammar_module, "MAX_REFUSED", 3)
    for i in range(5):
        with pytest.raises(FieldError):
            compiler.compile(Structured(regex="(" * (i + 2)))
    assert len(compiler._refused) == 3
