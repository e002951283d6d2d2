"""A real browser for tests: headless Chromium, spoken to over two pipes in its DevTools protocol."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Browser:
    """One page. `problems` are its errors, its console's warnings and requests that failed; `requests` all it asked."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        (child_in, self.out), (self.into, child_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (child_in, child_out)]  # not 3 or 4 themselves
        self.process = os.posix_spawn(
            PROGRAM,
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": str(profile)},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
            setpgroup=0,
        )
        for fd in (child_in, child_out, *ends):
            os.close(fd)
        self.numbers, self.heard, self.session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        page = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *reason: object) -> None:
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.out)
        os.close(self.into)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self.hear(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def hear(self, deadline: float) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self.heard:
            ready, _, _ = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            piece = os.read(self.into, 1 << 20)
            assert piece, "Chromium has ended"
            self.heard += piece
        line, self.heard = self.heard.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, address: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9, "Escape": 27}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screen(self, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """Size in CSS pixels, and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
            mobile=width < 600,
        )  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    @property
    def requests(self) -> list[str]:
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    @property
    def problems(self) -> list[str]:
        self.run("0")  # what was said until now has been heard
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Network.loadingFailed")
        told = [e for e in self.events if e["method"] in kinds]
        told += [
            e for e in self.events
            if e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] in ("error", "warning")
        ]  # fmt: skip
        return [json.dumps(e["params"])[:400] for e in told]
