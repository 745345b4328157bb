"""A headless Chromium, controlled over the pipes of its DevTools protocol: no driver and no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no Chromium on this machine; install it with: apt-get install chromium"
SOON = 240  # seconds


class Chromium:
    """One page of this size in pixels. `problems` are what the page's console and its scripts complain about."""

    def __init__(self, work: Path, width: int, height: int, mobile: bool = False):
        assert BINARY is not None
        to_browser, self.writing = os.pipe()
        self.reading, from_browser = os.pipe()
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
            *("--disable-extensions", "--disable-background-networking", f"--user-data-dir={work}"),
        ]
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, BINARY, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.left, self.session = 0, b"", None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.writing)
        os.close(self.reading)
        self.process.terminate()
        self.process.wait(SOON)

    def call(self, method: str, **parameters: object) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def message(self) -> dict:
        while b"\0" not in self.left:
            if not select.select([self.reading], [], [], SOON)[0]:
                raise RuntimeError(f"Chromium has not answered for {SOON} s")
            if not (part := os.read(self.reading, 1 << 16)):
                raise RuntimeError("Chromium has ended")
            self.left += part
        first, _, self.left = self.left.partition(b"\0")
        return json.loads(first)

    def note(self, event: dict) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(event["params"]["exceptionDetails"]["text"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])

    def value(self, expression: str) -> object:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> object:
        """The first value of an expression that is true."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            if value := self.value(expression):
                return value
            time.sleep(0.05)
        raise RuntimeError(f"not true after {SOON} s: {expression}")

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def type(self, selector: str, text: str) -> None:
        """As a person does: into the field that has the focus."""
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """A mouse click in its middle."""
        place = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def picture(self, path: Path) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
