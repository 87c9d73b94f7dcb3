"""A headless Chromium driven over its debugging pipe with the standard library alone, for tests of pages.

The fixture `browser` (tests/conftest.py) hands one out. Where none is installed tests are skipped with the reason; with
REQUIRE_BROWSER=1, which .ci/run sets, they fail.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # Nothing outside of this machine has an address; a page that asks for it fails, and the request is noted.
    *("--disable-extensions", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
)
# key: code, virtual key code and the text that it types
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    " ": ("Space", 32, " "),
    "ArrowDown": ("ArrowDown", 40, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
}


def executable() -> str | None:
    """The browser that BROWSER_EXECUTABLE names, else the first Chromium on the path."""
    named = os.environ.get("BROWSER_EXECUTABLE")
    return named or next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """One tab with a profile of its own; `requests` are the addresses it asked for, `errors` its exceptions."""

    browser: "Browser"
    session: str
    target: str
    context: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol to this tab."""
        return self.browser.call(method, session=self.session, **parameters)

    def open(self, address: str, timeout_s: float = 30) -> None:
        """Go to an address and wait until the document and its resources have loaded."""
        answer = self.call("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        self.wait_for("document.readyState === 'complete'", timeout_s)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited) as JSON; AssertionError where it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30) -> Any:
        """The expression's value once it is truthy; AssertionError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {expression}"
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        """The size of the window's inside in CSS pixels, as on a phone below 600."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def press(self, *keys: str) -> None:
        """Keys of `_KEYS` one after the other, as from a keyboard."""
        for key in keys:
            code, number, text = _KEYS[key]
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                typed = {"text": text} if text and kind == "keyDown" else {}
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number, **typed
                )

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """A PNG of the window, or of the whole document."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path


class Browser:
    """A running browser; `page` opens a tab in it."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.getuid() == 0 else [])]
        # The protocol is spoken on descriptors 3 and 4.
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "browser", program, *flags]
        self._process = subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number = 0
        self._unread = b""
        self._pages: dict[str, Page] = {}

    def call(self, method: str, session: str = "", timeout_s: float = 60, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; AssertionError where the browser refuses it or does not answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._next_message(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)

    @contextmanager
    def page(self, address: str = "", *, width: int = 1200, height: int = 800) -> Iterator[Page]:
        """A tab with a profile of its own at that address, closed afterwards."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target, context)
        try:
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.resize(width, height)
            if address:
                page.open(address)
            yield page
        finally:
            del self._pages[session]
            self.call("Target.closeTarget", targetId=target)
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """End the browser, whatever state it is in."""
        try:
            self.call("Browser.close", timeout_s=10)
            self._process.wait(timeout=10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _next_message(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            assert left > 0, f"the browser did not answer {method}"
            if select.select([self._read], [], [], left)[0]:
                piece = os.read(self._read, 1 << 20)
                assert piece, f"the browser ended at {method}"
                self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: Mapping[str, Any]) -> None:
        page = self._pages.get(str(event.get("sessionId", "")))
        if page is None:
            return
        parameters = event["params"]
        if event["method"] == "Network.requestWillBeSent":
            page.requests.append(parameters["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            page.errors.append(json.dumps(parameters["exceptionDetails"]))


@contextmanager
def launched(profile: Path) -> Iterator[Browser]:
    """A browser with its profile in that folder; the calling test is skipped, or fails, where there is none."""
    program = executable()
    if program is None:
        reason = "no Chromium on the path: install it (Debian: apt-get install chromium) or set BROWSER_EXECUTABLE"
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
