"""Compiles a `Structured` form into a grammar that constrains a sequence's tokens, and keeps the few compiled last.

Owns: what a form is in llguidance's language, which forms are kept and which were refused. Refuses to know: sampling,
sequences, devices.

A form is read byte by byte, and the bytes are those of `Tokenizer.pieces`: what the masks allow is what the text will
be. Where only one text can follow, the mask leaves the one token that the model's own tokenizer would put there.

llguidance works masks out when they are needed; nothing is enumerated ahead. What it spends on one of them is limited
(`matcher.py`). What it spends on compiling is not: a form is tried in a process of its own first (`sandbox.py`).
"""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.field_error import FieldError
from quire.structured.form import Structured
from quire.structured.matcher import TokenMatcher, Vocabulary, reason, start
from quire.structured.sandbox import GrammarTrial
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 32
"""Compiled forms that are kept."""
MAX_REFUSED = 1024
"""Refused forms that are remembered, about 1 kB each."""
REFUSED_SECONDS = 300
"""For how long: what a form takes depends a little on the machine, so that it is tried again at some time."""

_WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of JSON that is not compact: enough to indent it, not the endless blank that small models fall
into."""


class GrammarCompiler:
    """Compiles forms for one model and keeps the last few. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_ids)
        self._trial = GrammarTrial(self._vocabulary)
        self._kept: OrderedDict[tuple[Structured, str], TokenMatcher] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Digest of form and salt -> what is wrong with it, and until when that holds; oldest first."""
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None

    def compile(self, structured: Structured, salt: str = "", *, trusted: bool = False) -> "TokenMatcher":
        """A matcher that takes a sequence, and copies of it, through a form. FieldError if it is none, or too costly.

        Matchers of the same form and salt share what they have worked out and, should it come to that, their failure:
        give each tenant a salt of its own. A form that is not `trusted` is tried in a process of its own first: the
        first one takes a second longer, for that process to start, and any one a second at most.
        """
        key, where = (structured, salt), f"{structured.name}.{structured.kind}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key].copy()
        try:
            first = self._compile(structured, salt, where, trusted=trusted)
        except ImportError:
            message = f"{where} needs the library llguidance: pip install 'quire-llm[structured]'"
            raise FieldError(message, field=structured.name) from None
        matcher = TokenMatcher(first, self._vocabulary.text_words, partial(self._forget, key))
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)
        return matcher.copy()

    def _compile(self, structured: Structured, salt: str, where: str, *, trusted: bool) -> "llguidance.LLMatcher":
        import llguidance  # noqa: F401  first of all, so that it is missed by name

        text = to_llguidance(structured)
        if not trusted and (problem := self._try(text, salt)):
            raise FieldError(f"{where} is refused: {problem}", field=structured.name)
        with self._lock:
            if self._library is None:
                self._library = self._vocabulary.as_library()
            library = self._library
        matcher = start(library, text)
        if matcher.is_error():
            raise FieldError(f"{where} is refused: {reason(matcher)}", field=structured.name)
        return matcher

    def _try(self, text: str, salt: str) -> str | None:
        """What is wrong with a form; one that was refused a while ago under this salt is refused again at once."""
        digest = hashlib.sha256(f"{len(salt)} {salt}{text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            problem, until = self._refused.get(digest, ("", 0.0))
        if time.monotonic() < until:
            return problem
        verdict = self._trial.run(text)
        if verdict.problem and verdict.is_final:
            with self._lock:
                self._refused.pop(digest, None)
                self._refused[digest] = verdict.problem, time.monotonic() + REFUSED_SECONDS
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
        return verdict.problem

    def _forget(self, key: tuple[Structured, str]) -> None:
        with self._lock:
            self._kept.pop(key, None)


def to_llguidance(structured: Structured) -> str:
    """A form in llguidance's language, as JSON."""
    if structured.json_object:
        grammar = {"json_schema": {"type": "object", "x-guidance": _whitespace(structured)}}
    elif structured.json_schema is not None:
        grammar = {"json_schema": json.loads(str(structured.json_schema)) | {"x-guidance": _whitespace(structured)}}
    elif structured.regex is not None:
        from llguidance import regex_to_lark

        grammar = {"lark_grammar": f"start: /{regex_to_lark(structured.regex)}/"}
    elif structured.choice is not None:
        texts = (json.dumps(text).replace("\x7f", "\\u007f") for text in structured.choice)
        grammar = {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(texts)}"}
    else:
        grammar = {"lark_grammar": structured.grammar}
    return json.dumps({"grammars": [grammar]})


def _whitespace(structured: Structured) -> dict[str, Any]:
    """Llguidance's options for the whitespace of a JSON form; a schema itself cannot have any."""
    return {"whitespace_flexible": False} if structured.compact else {"whitespace_pattern": _WHITESPACE}
