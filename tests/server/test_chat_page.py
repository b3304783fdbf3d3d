"""The pages at / and /docs in a real browser: a message is answered as it is generated, and no text becomes markup."""

import json
import re

import pytest

from tests.server.browser import browsing, find_browser
from tests.server.process import LONGEST_S, SMALL, serving
from tests.server.tiny_folder import write_tiny_folder

pytestmark = [
    pytest.mark.own_server,
    pytest.mark.skipif(find_browser() is None, reason="no chromium on PATH; .ci/browser installs one"),
]

KEY = "a-key-of-a-person"
HOSTILE = "<img src=x onerror=document.title='owned'>"
IDLE = "!running && model"
ANSWER = "document.querySelector('.turn:last-child .body').textContent"
NOTE = "document.querySelector('.turn:last-child .note').textContent"


@pytest.fixture(scope="module")
def page():
    with browsing(find_browser()) as page:
        page.resize(900, 700)
        yield page


@pytest.fixture(scope="module")
def locked(tiny_folder):
    with serving(tiny_folder, *SMALL, "--api-key", KEY, "--served-model-name", HOSTILE) as running:
        yield running


def begin(page, server):
    """Open the page with a new conversation: the tab keeps the one before."""
    page.open(f"{server.url}/")
    page.run("$('anew').click(); for (const name of SETTINGS) $(name).value = ''; $('text').value = ''")
    page.run("$('login').hidden || $('key').focus()")  # the click has moved the focus to the text


def ask(page, text, **settings):
    """Type a message and send it; settings are fields of the request."""
    page.run(f"$('most').value = {settings.get('max_tokens', '')!r}")
    page.run("$('text').focus()")
    page.type(text)


def never_end(page):
    """From now on, answers have as many tokens as they may."""
    page.run("const asked = bodyOf; bodyOf = (text) => ({ ...asked(text), ignore_eos: true })")


def watch(page):
    """From now on, note how long the answer is whenever it grows."""
    page.run(
        "lengths = []; watcher = new MutationObserver(() => {"
        "const at = document.querySelector('.turn:last-child .body');"
        "if (at && at.textContent) lengths.push(at.textContent.length); });"
        "watcher.observe($('talk'), { childList: true, subtree: true, characterData: true })"
    )


def click_when_it_answers(page, button):
    """In the page, where no answer is too fast for it."""
    page.run(
        "hasClicked = false; new MutationObserver(() => {"
        "const at = document.querySelector('.turn:last-child .body');"
        "if (!hasClicked && running && at && at.textContent.length > 20) { hasClicked = true;"
        f"$('{button}').click(); }} }})"
        ".observe($('talk'), { childList: true, subtree: true, characterData: true })"
    )


def test_a_message_is_answered_as_it_is_generated(page, server):
    begin(page, server)
    page.wait("model !== null && document.activeElement.id === 'text'")
    text = page.run("document.body.innerText")
    assert "tiny" in text
    assert f"{server.url}/v1" in text
    never_end(page)
    page.run("lengths = null")
    watch(page)
    ask(page, "hello", max_tokens=2000)
    page.wait(IDLE + " && document.querySelectorAll('.turn').length === 2", 60)
    assert len(page.run("[...new Set(lengths)]")) > 3, "it came in one piece"
    assert " tokens in " in page.run(NOTE)
    assert page.run("turns.map((one) => one.role)") == ["user", "assistant"]
    ask(page, "and more", max_tokens=5)
    page.wait(IDLE + " && document.querySelectorAll('.turn').length === 4", 60)
    assert page.run("turns.length") == 4, "the conversation goes on"


def test_comments_between_the_events_of_a_stream_are_ignored(page, server):
    """The server sends one to a stream that waits."""
    begin(page, server)
    body = ': waiting\n\ndata: {"a": 1}\n\n: waiting\n\n: waiting\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    events = page.run(
        "(async () => { const events = [];"
        f"for await (const one of eventsOf(new Response({json.dumps(body)}))) events.push(one);"
        "return events; })()"
    )
    assert events == [{"a": 1}, {"a": 2}]


def test_stop_ends_it_here_and_on_the_server(page, server):
    begin(page, server)
    page.wait("model !== null")
    never_end(page)
    click_when_it_answers(page, "stop")
    ask(page, "hello", max_tokens=3000)
    page.wait("turns.length === 2", 60)
    page.wait(IDLE)
    assert page.run(NOTE) == "stopped"
    kept = page.run(ANSWER)
    assert len(page.run("turns[1].content")) >= len(kept) > 0
    server.wait_idle()
    assert page.run(ANSWER) == kept


def test_a_new_conversation_holds_nothing_of_the_one_that_it_ends(page, server):
    begin(page, server)
    page.wait("model !== null")
    never_end(page)
    click_when_it_answers(page, "anew")
    ask(page, "hello", max_tokens=3000)
    page.wait("hasClicked && " + IDLE, 60)
    assert page.run("turns.length + $('talk').childElementCount") == 0
    server.wait_idle()
    page.open(f"{server.url}/?again")
    page.wait("model !== null")
    assert page.run("turns.length + $('talk').childElementCount") == 0


def test_shift_enter_begins_a_line_and_enter_sends(page, server):
    begin(page, server)
    page.wait("model !== null")
    never_end(page)
    page.run("$('most').value = 2; $('text').focus()")
    page.call("Input.insertText", text="one")
    shifted = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8}
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, **shifted)
    assert page.run("document.querySelectorAll('.turn').length") == 0
    page.type("two")
    page.wait(IDLE + " && turns.length > 0", 60)
    assert page.run("turns[0].content") == "one\ntwo"


def test_with_keys_it_asks_for_one_and_keeps_it_nowhere(page, locked):
    begin(page, locked)
    page.wait("!$('login').hidden && document.activeElement.id === 'key'")
    assert page.run("$('send').disabled")
    page.type("a-key-that-is-wrong")
    page.wait("$('trouble').textContent === 'This key does not fit.'")
    page.type(KEY)
    page.wait("model !== null && $('login').hidden")
    never_end(page)
    ask(page, "hello", max_tokens=5)
    page.wait(IDLE + " && turns.length === 2", 60)
    assert page.run("localStorage.length + document.cookie.length") == 0
    assert KEY not in page.run("JSON.stringify(sessionStorage)")
    assert KEY not in page.run("document.documentElement.outerHTML")


def test_no_text_becomes_markup(page, locked):
    """Of the model's name, of what a person types, of what a model says, of an error."""
    begin(page, locked)
    page.wait("!$('login').hidden")
    page.type(KEY)
    page.wait("model !== null")
    assert page.run("$('model').textContent") == HOSTILE
    never_end(page)
    ask(page, HOSTILE, max_tokens=3)
    page.wait(IDLE + " && turns.length === 2", 60)
    page.run(
        f"(() => {{ const turn = show({json.dumps(HOSTILE)}, 'running'), told = {{ text: '', seconds: 0 }};"
        f"take({{ choices: [{{ delta: {{ content: {json.dumps(HOSTILE)} }} }}] }}, told, turn);"
        f"trouble({json.dumps(HOSTILE)}); }})()"
    )
    page.wait(f"document.body.textContent.split({json.dumps(HOSTILE)}).length > 5")
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title") == f"{HOSTILE} on Quire"


def test_a_model_without_a_chat_template_continues_text(page, tmp_path):
    with serving(write_tiny_folder(tmp_path / "plain", template=None), *SMALL) as plain:
        begin(page, plain)
        page.wait("model !== null")
        assert "no chat template" in page.run("document.body.innerText")
        ask(page, "Once upon", max_tokens=8)
        page.wait(IDLE + " && document.querySelectorAll('.turn').length === 2", 60)
        assert re.search(r"\b[1-8] tokens in ", page.run(NOTE)), "it may draw the end token before the limit"


def reload(page):
    page.run("isOld = true")
    page.call("Page.reload")
    page.wait("typeof isOld === 'undefined' && document.readyState === 'complete' && model !== null")


def test_a_conversation_survives_a_reload_and_a_half_answer_too(page, server):
    begin(page, server)
    page.wait("model !== null")
    never_end(page)
    page.run("$('system').value = 'Be brief.'")
    ask(page, "hello", max_tokens=5)
    page.wait(IDLE + " && turns.length === 2", 60)
    shown, said = page.run("$('talk').textContent"), page.run("turns.map((one) => one.content)")
    page.run("$('text').value = 'half a'")
    reload(page)
    assert page.run("turns.map((one) => one.content)") == said
    assert page.run("$('talk').textContent").endswith(shown.partition("hello")[2][-10:])
    assert page.run("[$('system').value, $('text').value, $('most').value]") == ["Be brief.", "half a", "5"]
    never_end(page)
    page.run("$('text').value = ''")
    ask(page, "and more", max_tokens=3000)
    page.wait("answering && answering.text.length > 20", 60)
    reload(page)
    assert page.run("turns.map((one) => one.role)") == ["user", "assistant"] * 2
    assert page.run(NOTE) == "stopped"
    server.wait_idle()


def drawn(page, text):
    """The HTML that the page makes of Markdown."""
    return page.run(f"(() => {{ const at = document.createElement('div'); drawMarkdown(at, {json.dumps(text)}); "
                    "return at.innerHTML; })()")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# Title", "<h3>Title</h3>"),
        ("a **b** *c* __d__ _e_", "<p>a <strong>b</strong> <em>c</em> <strong>d</strong> <em>e</em></p>"),
        ("2 * 3 * 4 snake_case_name", "<p>2 * 3 * 4 snake_case_name</p>"),
        ("`*a* <b>`", "<p><code>*a* &lt;b&gt;</code></p>"),
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("```py\n<b> *x*\n\n  y\n```\nz", "<pre><code>&lt;b&gt; *x*\n\n  y</code></pre><p>z</p>"),
        ("```\nopen", "<pre><code>open</code></pre>"),
        (
            "- a\n- b\n  - c\n\n- d",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("---", "<hr>"),
        ("\\*a\\*", "<p>*a*</p>"),
        (
            "[a](https://b.example/c)",
            '<p><a href="https://b.example/c" title="https://b.example/c" target="_blank" '
            'rel="noopener noreferrer">a</a></p>',
        ),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("[a](data:text/html,b)", "<p>[a](data:text/html,b)</p>"),
        ("[a](//evil.example)", "<p>[a](//evil.example)</p>"),
        ("![a](https://b.example/c.png)", None),
        ("<script>x</script>", "<p>&lt;script&gt;x&lt;/script&gt;</p>"),
    ],
)
def test_markdown_becomes_elements(page, server, text, html):
    if not page.run("location.href").startswith(server.url):
        begin(page, server)
    made = drawn(page, text)
    if html is not None:
        assert made == html
    assert "<img" not in made
    assert "<script" not in made


def test_hostile_markdown_is_drawn_in_bounded_time(page, server):
    begin(page, server)
    for text in ("*a" * 20_000, "**" * 20_000, "[" * 40_000, "`" * 40_001, "> " * 5_000 + "a", "_a " * 20_000,
                 "\n".join(" " * i + "- a" for i in range(500)), "- " * 5_000):  # fmt: skip
        seconds = page.run(
            f"(() => {{ const begin = performance.now(), at = document.createElement('div');"
            f"drawMarkdown(at, {json.dumps(text)});"
            "return (performance.now() - begin) / 1000; })()"
        )
        assert seconds < 20, text[:20]


def test_light_and_dark_differ(page, server):
    begin(page, server)
    colours = []
    for is_dark in (True, False):
        page.darken(is_dark)
        colours.append(page.run("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_the_api_is_documented_without_a_script(page, server):
    page.open(f"{server.url}/docs")
    text = page.run("document.body.innerText")
    for part in ("/v1/chat/completions", "/tokenize", "temperature", "whole number, 1 to 128", "structured_outputs"):
        assert part in text
    assert page.run("document.scripts.length") == 0
    links = page.run("[...document.querySelectorAll('a')].map((one) => one.getAttribute('href'))")
    assert f"curl -s {server.url}/v1/chat/completions" in text
    assert f"{server.url}/v1" in text
    for route in ("POST /v1/chat/completions", "GET /v1/models", "DELETE /v1/files/{file_id}"):
        assert route in page.run("document.querySelector('nav').innerText"), route
    anchors = page.run("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert {one[1:] for one in links if one.startswith("#")} <= set(anchors)


@pytest.mark.parametrize("width", [1000, 390])
def test_the_page_of_the_api_breaks_no_word(page, server, width):
    page.resize(width, 800)
    page.open(f"{server.url}/docs")
    broken = page.run(
        "[...document.querySelectorAll('td:first-child code, nav a, .method, th, h3')]"
        ".filter((one) => one.getClientRects().length > 1).map((one) => one.textContent)"
    )
    assert broken == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
    page.resize(900, 700)


def test_the_page_of_the_api_shows_the_address_that_the_browser_used(server):
    status, body = server.get("/docs", host=f"localhost:{server.port}")
    assert status == 200
    assert f"curl -s http://localhost:{server.port}/v1/completions" in body.decode()
    assert b"<b>" + b".example" not in server.get("/docs", host="<b>.example")[1]
    assert (
        f"curl -s https://localhost:{server.port}"
        in server.get("/docs", host=f"localhost:{server.port}", x_forwarded_proto="https")[1].decode()
    )


@pytest.mark.slow
def test_a_real_model_answers_on_the_page(page, smollm2_gguf, tmp_path):
    """What docs/landing-page.png shows."""
    with serving(smollm2_gguf, *SMALL, "--served-model-name", "smollm2") as real:
        page.resize(900, 640, scale=1.5)
        begin(page, real)
        page.wait("model !== null")
        page.run("$('temperature').value = 0")
        ask(page, "What is the capital of France?", max_tokens=24)
        page.wait(IDLE + " && turns.length === 2", LONGEST_S)
        assert "Paris" in page.run(ANSWER)
        page.screenshot(tmp_path / "landing-page.png")
        assert (tmp_path / "landing-page.png").read_bytes().startswith(b"\x89PNG")


def test_they_ask_nobody_else_and_complain_of_nothing(page, server, locked):
    """Last: of everything that the tests before did."""
    allowed = (f"{server.url}/", f"{locked.url}/", "http://127.0.0.1:", "data:", "about:")
    assert {one for one in page.fetched if not one.startswith(allowed)} == set()
    assert page.complaints == []
