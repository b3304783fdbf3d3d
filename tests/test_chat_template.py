"""Protects the server from a model's chat template, and the template's output from our protection."""

import threading
import time
from datetime import datetime

import pytest

from quire.checkpoint.tokenizer_files import default_template
from quire.text import chat_template, template_budget
from quire.text.chat_template import ChatTemplate
from quire.text.template_budget import ChatTemplateError

USER = [{"role": "user", "content": "Hi"}]

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Uses what the templates of real models use: macros, namespaces, loops with state, JSON, string methods, slices,
# formats, break, the generation tag, and the white space rules.
PROBE = """\
{%- set ns = namespace(count=0, last='') -%}
{%- macro show(value, indent=2) %}
<v>{{ value | tojson(indent=indent) }}</v>
{%- endmacro -%}
{{ bos_token }}
{% if tools is not none %}
    {%- for tool in tools %}
{{ tool | tojson }}
{{ show(tool.function.parameters.required) }}
        {%- for name, spec in tool['function']['parameters'].properties | dictsort %}
- {{ name | upper }}: {{ spec.get('type', 'any') }}{{ ', ' ~ spec.note if spec.note is defined else '' }}
        {%- endfor %}
    {%- endfor %}
{% endif %}
{% for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = message.role %}
    {% if message['role'] == 'assistant' %}
{% generation %}[{{ message.content.split('|') | join('+') }}]{% endgeneration %}
    {% else %}
<{{ message.role }} {{ loop.index }}/{{ loop.length }} {{ loop.index0 % 2 == 0 }}>\
{{ message.content | trim | replace('<b>', '*') }}
    {% endif %}
    {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ messages[::-1] | map(attribute='role') | list }} {{ '%s-%s' % (ns.count, ns.last) }} {{ '{}!'.format(ns.last) }} \
{{ 7 // 2 * 'ab' }}
{{- eos_token if add_generation_prompt }}
"""
TOOLS = [
    {
        "function": {
            "name": "wetter",
            "description": "<b>ü</b>",
            "parameters": {"properties": {"n": {}, "city": {"type": "string", "note": "a & b"}}, "required": ["city"]},
        }
    }
]


def render(source: str, messages: list = USER, *, add_generation_prompt: bool = True, **kwargs: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


# The expected strings below were recorded from transformers 5.22.


def test_smollm2_as_transformers_renders_it():
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert render(SMOLLM2) == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": '  <b>&"ü\n'},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "x"},
    ]
    assert render(SMOLLM2, conversation, add_generation_prompt=False) == (
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n  <b>&"ü\n<|im_end|>\n'
        "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    )


def test_everything_templates_use_as_transformers_renders_it():
    messages = [{"role": "user", "content": " Grüße & <b> 👍 "}, {"role": "assistant", "content": "a|b"}]
    assert render(PROBE, messages, tools=TOOLS) == (
        '<s>\n{"function": {"name": "wetter", "description": "<b>ü</b>", '
        '"parameters": {"properties": {"n": {}, "city": {"type": "string", "note": "a & b"}}, "required": ["city"]}}}\n'
        '<v>[\n  "city"\n]</v>- CITY: string, a & b- N: any<user 1/2 True>Grüße & * 👍\n'
        "[a+b]['assistant', 'user'] 2-assistant assistant! ababab</s>"
    )
    assert render(PROBE, add_generation_prompt=False) == "<s>\n<user 1/1 True>Hi\n['user'] 1-user user! ababab"


def test_tools_and_documents_are_none_unless_given():
    source = "{{ tools is none }} {{ documents is none }}"
    assert render(source) == "True True"
    assert render(source, tools=[], documents=[]) == "False False"


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")


def test_a_template_may_refuse_the_messages():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


INJECTIONS = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ range.__class__ }}",
    "{{ dict.__class__ }}",
    "{{ dict.mro() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__}'.format(x='') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{{ '{0[__class__]}'.format('') }}",
    "{% set f = 'x{0.__class__}'.format %}{{ f('') }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% set ns = namespace(__class__=1) %}",
    "{% for x in (1,) recursive %}{{ loop.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ messages|map('lower')|list.__class__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends '/etc/passwd' %}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.translate({}) }}",
    "{{ (1).from_bytes }}{{ (1).__class__ }}",
]


@pytest.mark.parametrize("source", INJECTIONS)
def test_template_injection_is_refused(source: str):
    with pytest.raises(ChatTemplateError):
        render(source)


def doubling(start: str, step: str, use: str) -> str:
    """A value made of itself, sixty times over, then used."""
    return (
        f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {step.replace('$', 'ns.x')} %}}{{% set ns.y = {step.replace('$', 'ns.y')} %}}{{% endfor %}}"
        f"{{{{ {use} }}}}"
    )


LONG = "{% set long = 'a' * 1000000 %}"
EXHAUSTION = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long body": "{% for a in range(99999) %}" + "{% set x = 1 %}" * 2000 + "{% endfor %}",
    "large range": "{% for a in range(10000000000) %}{% endfor %}",
    "much output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "macro calls itself": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "string times number": "{{ 'x' * 1000000000 }}",
    "number times list": "{{ (1000000000 * [1])|length }}",
    "power": "{{ 10 ** 10 ** 9 }}",
    "large numbers": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by plus": doubling("'a'", "$ + $", "ns.x|length"),
    "doubling by tilde": doubling("'a'", "$ ~ $", "ns.x|length"),
    "doubling lists": doubling("[1]", "$ + $", "ns.x|length"),
    "doubling blocks": (
        "{% set ns = namespace(x='a') %}"
        "{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}"
    ),
    "printing nested lists": doubling("[1]", "[$, $]", "ns.x"),
    "printing nested dicts": doubling("[1]", "dict(a=$, b=$)", "ns.x"),
    "JSON of nested lists": doubling("[1]", "[$, $]", "ns.x|tojson"),
    "text of nested lists": doubling("[1]", "[$, $]", "ns.x|string|length"),
    "joining nested lists": doubling("[1]", "[$, $]", "ns.x|join|length"),
    "formatting nested lists": doubling("[1]", "[$, $]", "'{}'.format(ns.x)|length"),
    "percent of nested lists": doubling("[1]", "[$, $]", "('%s' % ns.x)|length"),
    "tilde of nested lists": doubling("[1]", "[$, $]", "('' ~ ns.x)|length"),
    "comparing nested lists": doubling("[1]", "[$, $]", "ns.x == ns.y"),
    "testing nested lists": doubling("[1]", "[$, $]", "ns.x is eq ns.y"),
    "searching nested lists": doubling("[1]", "[$, $]", "[ns.x].index(ns.y)"),
    "sorting nested lists": doubling("[1]", "[$, $]", "[ns.x, ns.y]|map('list')|sort|length"),
    "hashing nested tuples": doubling("(1, 2)", "($, $)", "{ns.x: 1}|length"),
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format in format": "{{ '{:{w}}'.format(1, w='1000000000') }}",
    "many fields": LONG + "{{ ('{0}' * 9999).format(long)|length }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "center": "{{ 'x'.center(99999) }}",
    "center filter": "{{ 'x'|center(99999) }}",
    "replace": LONG + "{{ long.replace('', long)|length }}",
    "replace filter": LONG + "{{ long|replace('', long)|length }}",
    "join": LONG + "{{ long.join(long)|length }}",
    "join filter": LONG + "{{ range(99999)|join(long)|length }}",
    "indent": "{{ ('\n' * 1000000)|indent(99999)|length }}",
    "JSON indent": "{{ [[[1]]]|tojson(indent=99999) }}",
    "JSON separators": LONG + "{{ range(9999)|list|tojson(separators=(long, long)) }}",
    "slices": LONG + "{% for i in range(99999) %}{% set x = long[1:] %}{% endfor %}",
    "searches": LONG + "{% for i in range(99999) %}{% if 'b' in long or long.find('b') > 0 %}{% endif %}{% endfor %}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big')|length }}",
    "rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "dates": "{{ strftime_now('%d' * 100000) }}",
    "lorem ipsum": "{{ lipsum(n=99999) }}",
    "deep blocks": "{% for a in [1] %}" * 50 + "{% endfor %}" * 50,
}


@pytest.mark.slow
@pytest.mark.parametrize("source", EXHAUSTION.values(), ids=EXHAUSTION.keys())
def test_a_template_cannot_exhaust_the_server(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_budget, "MAX_WORK", 1_000_000)  # a twentieth of the real one, for short tests
    with pytest.raises(ChatTemplateError):
        render(source)


@pytest.mark.alone
@pytest.mark.parametrize("source", EXHAUSTION.values(), ids=EXHAUSTION.keys())
def test_what_a_template_may_do_takes_little_time(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_budget, "MAX_WORK", 1_000_000)
    started = time.thread_time()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.thread_time() - started < 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Jinja's lexer, cut off in mid-air
def test_deep_expressions_are_refused():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        render("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def test_a_template_cannot_refill_its_budget():
    with pytest.raises(ChatTemplateError):
        render("{{ (-1000000)|spend }}")
    with pytest.raises(ChatTemplateError):
        render("{{ [-1000000]|map('spend')|list }}")


def test_ordinary_chats_are_far_from_the_limits(monkeypatch: pytest.MonkeyPatch):
    """A long chat, and a single message of a million characters, with a twentieth of the budget."""
    monkeypatch.setattr(template_budget, "MAX_WORK", 1_000_000)
    assert len(render(SMOLLM2, USER * 2000)) > 2000
    assert len(render(SMOLLM2, [{"role": "user", "content": "x" * 1_000_000}])) > 1_000_000


def test_the_budget_is_per_rendering():
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}ok", {})
    assert [template.render(USER, add_generation_prompt=True) for _ in range(10)] == ["ok"] * 10


def test_threads_share_a_template():
    template = ChatTemplate(SMOLLM2, {})
    wrong = []

    def work(name: str) -> None:
        for _ in range(50):
            text = template.render([{"role": "user", "content": name}] * 5, add_generation_prompt=True)
            if text.count(name) != 5:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(f"<{i}>",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_large_template_is_refused():
    with pytest.raises(ChatTemplateError, match="at most 131072"):
        ChatTemplate("x" * (chat_template.MAX_TEMPLATE_CHARS + 1), {})


def test_a_broken_template_is_refused():
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*USER, {"content": "x"}], r"messages\[1\]\.role must be a string, got nothing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role must be a string, got int"),
        ([{"role": "user"}], r"messages\[0\]\.content must be a string, got nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be a string, got NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content must be a string, got list"),
    ],
)
def test_bad_messages_name_index_and_field(messages: list, error: str):
    with pytest.raises(ValueError, match=error):
        render(SMOLLM2, messages)


def test_special_tokens_belong_to_the_model():
    with pytest.raises(ValueError, match="bos_token"):
        render("{{ bos_token }}", bos_token="<forged>")


def test_default_template():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert [default_template(value, "f") for value in (None, "x", named)] == [None, "x", "D"]
    for value in (named[:1], 5, [{"name": "default", "template": 5}], [{"name": "default"}]):
        with pytest.raises(ValueError, match="chat_template"):
            default_template(value, "tokenizer_config.json: chat_template")
