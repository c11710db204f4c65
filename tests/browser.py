"""Chromium without a window, driven by its DevTools protocol over a pipe; tests skip where it is not installed."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab."""

    def __init__(self, calls, answers):
        self._calls, self._answers = calls, answers
        self._number, self._buffer, self.events = 0, b"", []
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._calls.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        while b"\0" not in self._buffer:
            found = self._answers.read1(1 << 16)
            assert found, "chromium ended"
            self._buffer += found
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1280, height=800, dark=False, phone=False):
        """Load a file; `events` has what happened meanwhile."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression):
        """A JavaScript expression's value."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text,
                      windowsVirtualKeyCode={"Tab": 9, "Enter": 13}.get(key, 0))  # fmt: skip

    def requests(self):
        """The addresses that the page loaded, besides itself and the data inside it."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        urls = [each["request"]["url"] for each in sent if each.get("type") != "Document"]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self):
        """Errors and warnings of the console, and exceptions."""
        found = [event["params"] for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        found += [event["params"] for event in self.events if event.get("method") == "Log.entryAdded"]
        called = (event["params"] for event in self.events if event.get("method") == "Runtime.consoleAPICalled")
        return found + [each for each in called if each["type"] in ("error", "warning", "assert")]

    def screenshot(self, path, whole=True):
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(picture))


@contextlib.contextmanager
def browser(folder):
    """A Page; its profile is in `folder`."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no chromium: the page was not opened in a browser (apt-get install chromium)")
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()

    def numbered():
        """Chromium reads from 3 and writes to 4."""
        high_in, high_out = os.dup2(their_in, 103), os.dup2(their_out, 104)
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(3, 4, their_in, their_out), preexec_fn=numbered, **quiet)
    os.close(their_in)
    os.close(their_out)
    try:
        with os.fdopen(our_in, "rb") as answers, os.fdopen(our_out, "wb", buffering=0) as calls:
            page = Page(calls, answers)
            yield page
            page._session = None
            page.call("Browser.close")
    finally:
        process.kill()
        process.wait()
