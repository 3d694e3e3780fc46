"""A page in a real browser without a screen: Chromium, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
KEYS = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}  # their codes on Windows, which the protocol takes


class Page:
    """One tab. `requests` are the addresses it asked for, `complaints` what its console reports as errors."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._left = to_browser, from_browser, b""
        self._number, self._session = 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result; AssertionError with the browser's answer where it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "result" in answer, f"{method}: {answer.get('error')}"
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._from], [], [], PATIENCE_S)
            part = os.read(self._from, 1 << 16) if ready else b""
            assert part, "the browser ended" if ready else "the browser does not answer"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"]["text"])
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"])

    def open(self, url: str) -> None:
        self.tell("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page, as JSON has it."""
        found = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Until an expression is true: its value."""
        until = time.monotonic() + PATIENCE_S
        while not (found := self.value(expression)):
            assert time.monotonic() < until, f"never true: {expression}; the page says {self.text('body')!r}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return self.value(f"document.querySelector({json.dumps(selector)}).innerText")

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self.tell("Input.insertText", text=text)

    def press(self, key: str) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.tell("Input.dispatchKeyEvent", type="rawKeyDown", **about)
        self.tell("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self, path: Path, width: int = 1000, height: int = 900, dark: bool = False) -> None:
        """A PNG of the page on a screen of that size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path, *switches: str) -> Iterator[Page]:
    """A page of a fresh browser, whose profile is in `folder`; `switches` as on its command line."""
    assert FOUND is not None
    options = [
        *switches,
        "--headless",
        "--remote-debugging-pipe",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # which root cannot have
    # The browser reads commands from descriptor 3 and answers on 4.
    with_pipes = ["bash", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "bash"]
    process = subprocess.Popen(
        [*with_pipes, FOUND, *options, f"--user-data-dir={folder}", "about:blank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Page(process.stdin.fileno(), process.stdout.fileno())
    finally:
        process.stdin.close()  # which ends it
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
