"""A real browser without a window, driven over its own debugging pipe."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server.process import LONGEST_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--no-first-run", "--disable-background-networking", "--disable-sync", "--hide-scrollbars", "--mute-audio",
)  # fmt: skip


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._unread = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        """Everything the browser said unasked: what the page logged, and what it fetched."""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            data = os.read(self._from, 1 << 20)
            assert data, "the browser is gone"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_s: float = LONGEST_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """As a person would, into whatever has the focus; ends with Enter."""
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def point(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a place inside an element."""
        left, top = self.run(
            f"(() => {{ const box = document.querySelector({selector!r}).getBoundingClientRect(); "
            "return [box.left, box.top]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + x, y=top + y)

    def resize(self, width: int, height: int, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def darken(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def complaints(self) -> list[str]:
        """What went wrong in the page: exceptions, and what its policy forbade; no refused request, no advice."""
        self.run("1")
        errors = [one["params"] for one in self.events if one["method"] == "Runtime.exceptionThrown"]
        entries = [one["params"]["entry"] for one in self.events if one["method"] == "Log.entryAdded"]
        return [
            json.dumps(one)
            for one in errors + [one for one in entries if one["source"] not in ("network", "rendering")]
        ]

    @property
    def fetched(self) -> set[str]:
        """Every address the page asked for."""
        sent = [one["params"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return {one["request"]["url"] for one in sent}


@contextlib.contextmanager
def browsing(browser: str) -> Iterator[Page]:
    its_end_in, to_browser = os.pipe()
    from_browser, its_end_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = f'exec "$0" "$@" 3<&{its_end_in} 4>&{its_end_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, browser, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(its_end_in, its_end_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_end_in)
        os.close(its_end_out)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
