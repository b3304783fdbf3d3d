"""The sandbox in which chat templates run: programs from model files, run on messages from strangers.

A template cannot reach Python (Jinja's immutable sandbox, plus lists of the filters and string methods it may use),
cannot read files or other templates, and cannot run for long or grow for ever: everything it does is paid from a
budget. Within those bounds it renders what `apply_chat_template` of transformers does.

    what can run for long           how it is paid
    loops, macros                   a statement that pays for the body is put in front of it (`_AddPayments`)
    strings and lists that are made by length, once they exist (`Meter.made`)
    printing, comparing, sorting    by everything the value holds, before it is read (`Meter.read`)
    `*`, formats, replace, join ... the size of the result is checked before it is made (`check_size`)
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

import jinja2.ext
from jinja2 import filters, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from quire.text.template_budget import (
    CALL_WORK,
    ChatTemplateError,
    Meter,
    check_format,
    check_number_argument,
    check_power,
    check_replace,
    check_size,
)

_MAX_JSON_INDENT = 16


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters that do not look into the elements of what they are given, and those that do.
_CHEAP_FILTERS = _names(
    "count d default first items last length list map reject rejectattr reverse safe select selectattr"
)
_READING_FILTERS = _names(
    "abs capitalize dictsort e escape float int lower max min round sort string title trim unique upper"
)
_COMPARING_TESTS = _names("eq equalto ne lt lessthan le gt greaterthan ge in == != < <= > >=")
_STRING_METHODS = _names(
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower "
    "isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter, fewer filters and methods, and what transformers adds."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        # Not optimized: the optimizer would run filters on constants while compiling, unmetered.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._finalize,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.refill()
        for name in ("lipsum", "cycler", "joiner"):  # favourite ways to Python's globals, of no use in a chat
            del self.globals[name]
        self.globals["dict"] = _make_dict
        self.globals["namespace"] = _SafeNamespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

        reading = {name: self.filters[name] for name in _READING_FILTERS}
        reading |= {"indent": _indent, "join": _join, "replace": _replace, "tojson": _tojson}
        self.filters = {name: self._paid(self.filters[name], Meter.made) for name in _CHEAP_FILTERS}
        self.filters |= {name: self._paid(filter_, Meter.read) for name, filter_ in reading.items()}
        self.tests |= {name: self._paid(self.tests[name], Meter.read) for name in _COMPARING_TESTS}

    def refill(self) -> None:
        """Begin a rendering with a full budget."""
        self.meter = Meter()

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block; too much of it is refused before it is joined."""
        kept, num_chars = [], 0
        for part in parts:
            num_chars += len(part)
            check_size(num_chars)
            kept.append(part)
        return self.meter.made("".join(kept))

    def concat_values(self, *values: Any) -> str:
        """Join values as text: what `a ~ b ~ c` does in a template."""
        return self.concat(str(self.meter.read(value)) for value in values)

    def spend(self, work: int) -> None:
        """Pay for work; for templates, through `_AddPayments`."""
        self.meter.spend(work)

    def made(self, value: Any) -> Any:
        """Pay for a value by its own length, and return it; for templates, through `_AddPayments`."""
        return self.meter.made(value)

    def read(self, value: Any) -> Any:
        """Pay for a value and all it holds, and return it; for templates, through `_AddPayments`."""
        return self.meter.read(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = _AddPayments().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    @pass_context
    def _finalize(self, context: Context, value: Any) -> Any:
        return self.meter.read(value)

    def _paid(self, function: Callable[..., Any], pay: Callable[[Meter, Any], Any]) -> Callable[..., Any]:
        """A filter or test that pays for its arguments before it runs and for its result after."""

        @wraps(function)  # also carries over which of context and environment Jinja passes first
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(CALL_WORK)
            if pay is Meter.read:  # a generator can be paid only once it is a list
                args = tuple(list(arg) if isinstance(arg, GeneratorType) else arg for arg in args)
            for arg in (*args, *kwargs.values()):
                check_number_argument(arg)
                pay(self.meter, arg)
            return self.meter.made(function(*args, **kwargs))

        return paid

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, macro or method from a template."""
        owner = getattr(function, "__self__", None)
        if owner is self:  # put there by `_AddPayments`; a template has no name for the environment
            return function(*args)
        self.meter.spend(CALL_WORK)
        for arg in (*args, *kwargs.values()):
            check_number_argument(arg)
        if isinstance(owner, (str, list, tuple)):
            args = tuple(list(arg) if isinstance(arg, GeneratorType) else arg for arg in args)
            self.meter.read([owner, *args])
        if isinstance(owner, str) and function.__name__ == "replace":
            check_replace(owner, *args[:2])
        if isinstance(owner, str) and function.__name__ == "join":
            check_size(len(owner) * len(args[0]))
        return self.meter.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply `left operator right` for a template."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    check_size(len(value) * times)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            self.meter.read(right)
        return self.meter.made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute; of strings only the listed methods."""
        if isinstance(obj, str) and attr not in _STRING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Raise SecurityError for a private attribute."""
        # Jinja would print nothing for `{{ ''.__class__ }}` and complain only further on.
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} is unsafe")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """A `str.format` that is checked and pays for its arguments; None if the value is none."""
        format_ = super().wrap_str_format(value)
        if format_ is None:
            return None
        check_format(value.__self__)

        def paid(*args: Any, **kwargs: Any) -> str:
            self.meter.read([*args, kwargs])
            return format_(*args, **kwargs)

        return paid


class _AddPayments(NodeTransformer):
    """Rewrites a parsed template so that what Jinja compiles to plain Python is paid for too."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._pay_for_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._pay_for_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._pay_for_body(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_values", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # Against a constant, a comparison looks at the length of the other side, not into its elements.
        has_constant = any(isinstance(e, nodes.Const) for e in (node.expr, *(o.expr for o in node.ops)))
        pay = "made" if has_constant else "read"
        node.expr = _call(pay, node.expr)
        for operand in node.ops:
            operand.expr = _call(pay, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        # Paid in full when it is made: a tuple may be hashed, and hashing reads all of it.
        return _call("read", node) if node.ctx == "load" else node

    def _pay_for_body[BodyNode: (nodes.For, nodes.Macro, nodes.CallBlock)](self, node: BodyNode) -> BodyNode:
        num_nodes = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        payment = _call("spend", nodes.Const(CALL_WORK + num_nodes, lineno=node.lineno))
        node.body.insert(0, nodes.ExprStmt(payment, lineno=node.lineno))
        return node


def _call(method: str, *args: nodes.Expr) -> nodes.Call:
    """A call of a method of `TemplateSandbox`, as part of a template."""
    lineno = args[0].lineno
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=lineno)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _SafeNamespace(Namespace):
    """A namespace without private names, whose text does not grow with what it holds."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *attributes = args
        for name in dict(*attributes, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *attributes, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the private name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"chat template refused the messages: {message}"[:500])


def _strftime_now(format: str) -> str:  # noqa: A002 (templates may pass it by name)
    if len(format) > 100:
        raise ChatTemplateError(f"chat template asks for a date in a format of {len(format)} characters")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, Unicode as it is."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_JSON_INDENT:
        raise ChatTemplateError(f"chat template asks for JSON with an indent of more than {_MAX_JSON_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    parts, num_chars = [], 0
    for part in encoder.iterencode(value):
        num_chars += len(part)
        check_size(num_chars)
        parts.append(part)
    return "".join(parts)


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = list(value)
    check_size(len(str(d)) * len(values))
    return filters.sync_do_join(context, values, d, attribute)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_size((len(width) if isinstance(width, str) else width) * (str(s).count("\n") + 1))
    return filters.do_indent(s, width, first, blank)


@pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    check_replace(str(s), str(old), str(new))
    return filters.do_replace(context, s, old, new, count)
