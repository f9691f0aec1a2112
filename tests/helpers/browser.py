"""A headless Chromium, driven by the DevTools protocol over two pipes: no package and no port."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # seconds; for a machine with much else to do
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowDown": 40,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "ArrowUp": 38,
    "Home": 36,
    "End": 35,
}
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


@functools.cache
def find_browser() -> str:
    """Return the path of a Chromium; without one, skip the test."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium")
    return found


class Browser:
    """A running browser; `open` makes a page in it, with cookies and storage of its own."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        # The protocol's pipes are descriptors 3 and 4; the shell puts them there.
        redirect = f'exec "$0" "$@" 3</dev/fd/{to_browser} 4>/dev/fd/{from_browser}'
        command = ["sh", "-c", redirect, find_browser(), "--headless", "--no-sandbox", "--disable-gpu"]
        command += ["--remote-debugging-pipe", "--hide-scrollbars", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._read = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.call("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> Page:
        """Return a new page that has loaded `url`."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            page.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.resize(width, height)
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command; what else the browser tells goes to its page."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._commands, rest) :]
        for answer in self.listen(PATIENCE):
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
        raise AssertionError(f"the browser did not answer {method} within {PATIENCE:.0f} s")

    def listen(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Yield what the browser tells, until it has told nothing new for so long."""
        while True:
            *messages, self._read = self._read.split(b"\0")
            for place, text in enumerate(messages):
                self._read = b"\0".join([*messages[place + 1 :], self._read])
                message = json.loads(text)
                if "method" in message and message.get("sessionId") in self._pages:
                    self._pages[message["sessionId"]].note(message["method"], message["params"])
                yield message
                break
            else:
                if not wait([self._answers], seconds):
                    return
                read = os.read(self._answers, 1 << 20)
                if not read:
                    raise OSError("the browser has ended")
                self._read += read


class Page:
    """A page of the browser, and what went wrong in it.

    Attributes:
        troubles: errors on the console, exceptions, what the security policy forbade, dialogs.
        requests: the URL of each request; what has its data in its own is none.
    """

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            if not event["request"]["url"].startswith("data:"):
                self.requests.append(event["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.troubles.append(json.dumps(event["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.troubles.append(f"{event['type']}: {json.dumps(event['args'])[:2000]}")
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            entry = event["entry"]
            self.troubles.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Page.javascriptDialogOpening":
            self.troubles.append(f"dialog: {event['message']}")

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Return the value of an expression as soon as it is something; an element is."""
        end = time.monotonic() + PATIENCE
        while (value := self.evaluate(script)) in (None, False, 0, ""):
            assert time.monotonic() < end, f"never true: {script}\n{self.text()[:3000]}\n{self.troubles}"
            time.sleep(0.01)
        return value

    def text(self) -> str:
        """Return the text that is shown."""
        return str(self.evaluate("document.body.innerText"))

    def press(self, key: str, *modifiers: str) -> None:
        """Press and release a key, as in press("Enter", "Shift")."""
        held = sum(MODIFIERS[modifier] for modifier in modifiers)
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": held}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def find_middle(self, selector: str) -> list[float]:
        """Return the x and y of the middle of an element, scrolled to where it is seen."""
        place: list[float] = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            "return r.width && [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return place

    def hover(self, selector: str) -> None:
        """Move the mouse into the middle of an element."""
        place = self.find_middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        place = self.find_middle(selector)
        event = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **event)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **event)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def running_browser(profile: Path) -> Generator[Browser, None, None]:
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
