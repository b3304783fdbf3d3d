"""The page at /debug in a real browser: it lets nobody in without the key, draws what runs, and believes no text."""

import concurrent.futures
import copy
import json
import re
import threading
import time

import pytest

from tests.server.browser import browsing, find_browser
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = [
    pytest.mark.own_server,
    pytest.mark.skipif(find_browser() is None, reason="no chromium on PATH; .ci/browser installs one"),
]

KEY = "a-key-of-an-admin"
HOSTILE = "<img src=x onerror=document.title='owned'>"
INSIDE = "!document.getElementById('inside').hidden"


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, *SMALL, "--admin-port", "0", "--admin-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def url(server):
    return next(found[1] for line in server.lines if (found := re.search(r"(http://\S+/debug)", line)))


@pytest.fixture(scope="module")
def page():
    with browsing(find_browser()) as page:
        page.resize(1200, 1000)
        yield page


@pytest.fixture
def busy(server, url):
    """Clients that ask again and again, with one beginning; one of them wants two answers."""
    admin = copy.copy(server)
    admin.url = url.removesuffix("/debug")
    body = {"model": "tiny", "prompt": "the same beginning " * 8, "max_tokens": 600, "ignore_eos": True, "n": 1}
    is_over = threading.Event()

    def ask(one: dict) -> None:
        while not is_over.is_set():
            server.post("/v1/completions", one)

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        running = [pool.submit(ask, body | {"n": 2})]
        running += [pool.submit(ask, body) for _ in range(9)]
        yield
        is_over.set()
        while not all(one.done() for one in running):
            admin.post("/admin/abort_all", {}, authorization=f"Bearer {KEY}")
            time.sleep(0.1)
    server.wait_idle()


def enter(page, url):
    page.open(url)
    if page.run("sessionStorage.length") == 0:
        page.wait("document.activeElement.id === 'key'")
        page.type(KEY)
    page.wait(INSIDE)


def pixels(page, canvas) -> list[str]:
    """The colours in a canvas, most frequent first; not where nothing is drawn."""
    return page.run(
        f"""(() => {{
            const one = document.getElementById({canvas!r}), counts = new Map();
            const data = new Uint32Array(one.getContext("2d").getImageData(0, 0, one.width, one.height).data.buffer);
            for (const value of data) if (value) counts.set(value, (counts.get(value) || 0) + 1);
            return [...counts].sort((a, b) => b[1] - a[1]).map(([value]) => css(value));
        }})()"""
    )


def test_without_the_key_there_is_a_field_and_nothing_else(page, url):
    page.open(url)
    page.wait("document.activeElement.id === 'key'")
    page.type("a-key-that-is-wrong")
    page.wait("document.getElementById('refused').textContent !== ''")
    assert not page.run(INSIDE)
    assert page.run("sessionStorage.length") == 0, "a key that does not fit is not kept"
    assert page.run("latest") is None


def test_it_draws_what_runs(page, url, busy):
    enter(page, url)
    page.wait("latest.stats.running === 8 && document.querySelectorAll('#rows tr').length >= 10")
    assert len(set(pixels(page, "device"))) > 4, "free, cached, and several requests"
    text = page.run("document.body.innerText")
    assert "tiny" in text
    assert "512 pages of 16 tokens" in text
    assert "running" in text
    assert "waiting" in text
    before = page.run("latest.stats.generated_tokens")
    page.wait(f"latest.stats.generated_tokens > {before}")
    assert len(pixels(page, "rate-chart")) > 2
    assert len(pixels(page, "step-chart")) > 2


def test_a_page_under_the_mouse_says_who_holds_it(page, url, busy):
    enter(page, url)
    page.wait("latest.pools[0].device.owners.some((one) => one.length > 1)")
    x, y = page.run(
        "(() => { const tier = latest.pools[0].device, at = tier.page[tier.owners.findIndex((one) => one.length > 1)];"
        "const { step, columns } = views.device;"
        "return [(at % columns + 0.5) * step, (Math.floor(at / columns) + 0.5) * step]; })()"
    )
    page.point("#device", x, y)
    page.wait(
        "/page \\d+ · 16 of 16 positions · refcount \\d+ · held for/.test(document.getElementById('about').textContent)"
    )


def test_a_name_that_is_markup_stays_text(page, url, busy):
    """The HTTP port lets no such name in; others may."""
    enter(page, url)
    page.wait("latest.sequences.length >= 8")
    text = page.run(
        f"for (const one of latest.sequences) one.request = {json.dumps(HOSTILE)};"
        f"latest.server.model = {json.dumps(HOSTILE)}; draw(); document.body.textContent"
    )
    assert text.count(HOSTILE) > 8
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run("document.title") == "Quire: pages"


@pytest.mark.parametrize("mode", ["sharing", "age", "request"])
def test_pages_are_coloured_by_what_one_asks_for(page, url, busy, mode):
    enter(page, url)
    page.wait("latest.stats.running === 8")
    page.run(
        f"document.getElementById('mode').value = {mode!r};"
        "document.getElementById('mode').dispatchEvent(new Event('change'))"
    )
    assert len(set(pixels(page, "device"))) > 3


def test_light_and_dark_differ(page, url):
    enter(page, url)
    colours = []
    for is_dark in (True, False):
        page.darken(is_dark)
        page.run("draw()")
        colours.append((page.run("getComputedStyle(document.body).backgroundColor"), pixels(page, "device")[0]))
    assert colours[0][0] != colours[1][0]
    assert colours[0][1] != colours[1][1]


def test_a_large_pool_is_drawn_in_time(page, url):
    """100,000 pages, a third of them cached and a third held by 500 requests: well inside half a second."""
    enter(page, url)
    milliseconds = page.run(
        """(async () => {
            clearTimeout(timer);
            isAsking = true;  // nothing comes between
            await new Promise((done) => setTimeout(done, 300));
            const before = latest, count = 100000, held = 33000, pages = [...Array(2 * held).keys()];
            latest = structuredClone(before);
            latest.sequences = [...Array(500).keys()].map((i) => ({
              request: "r" + i, index: 0, state: "running", age_s: i, prompt_tokens: 9, output_tokens: 9, max_tokens: 9,
              computed_tokens: 9, cached_tokens: 0, preemptions: 0, pages: 66 }));
            latest.pools[0].device = {
              num_pages: count, is_complete: true, page: pages, refcount: pages.map(() => 1),
              fill: pages.map((i) => i % 17), owners: pages.map((i) => i < held ? [i % 500] : []),
              age_s: pages.map((i) => i < held ? i % 500 : null),
              eviction: pages.map((i) => i < held ? null : i - held),
            };
            let fastest = Infinity;
            for (let i = 0; i < 5; i++) {
                const start = performance.now();
                draw();
                fastest = Math.min(fastest, performance.now() - start);
            }
            latest = before;
            isAsking = false;
            update();
            return fastest;
        })()"""
    )
    assert milliseconds < 400


def test_a_trace_can_be_downloaded(page, url, tmp_path):
    enter(page, url)
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.getElementById('trace').click()")
    deadline = time.monotonic() + LONGEST_S
    while not (found := list(tmp_path.glob("*.json"))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads(found[0].read_text())["traceEvents"]


def test_it_asks_nobody_else_and_complains_of_nothing(page, url):
    """Last: of everything that the tests before did."""
    enter(page, url)
    base = url.removesuffix("debug")
    assert {one for one in page.fetched if not one.startswith((base, "blob:", "data:", "about:"))} == set()
    assert page.complaints == []


def test_its_policy_lets_no_other_script_run(page, url):
    enter(page, url)
    page.run(
        "(() => { const one = document.createElement('script'); one.textContent = 'window.owned = 1'; "
        "document.body.append(one); })()"
    )
    assert page.run("window.owned === undefined")
    assert any("Content Security Policy" in one for one in page.complaints)
