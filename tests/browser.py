"""A headless Chromium, driven over its own pipe: no driver and no package is needed besides the browser."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"Escape": 27, "ArrowRight": 39}


def find_browser() -> str | None:
    """The browser's path, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser.

    Args:
        path: the browser.
        profile: an empty folder for its files.
    """

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def attach() -> None:  # it reads from 3 and writes to 4; moved out of the way first, as they may be 4 and 3
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
            for number, end in zip((3, 4), ends, strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=attach,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Load a page at a size and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one point of the window and release it at another."""
        self._mouse("mousePressed", start)
        for share in (0.3, 0.6, 1.0):
            self._mouse("mouseMoved", tuple(a + share * (b - a) for a, b in zip(start, end, strict=True)))
        self._mouse("mouseReleased", end)

    def press(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """A picture of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def overflowing(self) -> list[str]:
        """What reaches beyond the window's right edge and can be neither scrolled to nor is meant to be hidden."""
        return self.evaluate("""(() => {
          const width = document.documentElement.clientWidth;
          const contained = (element) => {
            for (let box = element.parentElement; box && box !== document.body; box = box.parentElement)
              if (getComputedStyle(box).overflowX !== "visible" && box.getBoundingClientRect().right <= width + 1)
                return true;
            return false;
          };
          return Array.from(document.querySelectorAll("header, nav, main, section, article, article *, main *"))
            .filter((element) => element.getClientRects().length && element.getBoundingClientRect().right > width + 1)
            .filter((element) => !contained(element))
            .map((element) => `${element.tagName} ${element.className} ${element.textContent.trim().slice(0, 40)}`);
        })()""")

    def handle(self, name: str) -> tuple[float, float]:
        """Where the playground's handle of a vector stands in the window; the playground is brought into it."""
        self.evaluate(
            "document.querySelector('.rum-playground').scrollIntoView({block: 'center', behavior: 'instant'})"
        )
        x, y = self.evaluate(f"""(() => {{
          const box = document.querySelector(".rp-handle[data-name={name}]").getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        return x, y

    def terms(self) -> list[str]:
        """What the playground writes behind each term of the formula."""
        return self.evaluate("Array.from(document.querySelectorAll('.rp-terms dd')).map(cell => cell.textContent)")

    def _mouse(self, kind: str, at: tuple[float, ...]) -> None:
        held = {"button": "left", "buttons": 0 if kind == "mouseReleased" else 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **held)

    def _read(self) -> dict[str, Any]:
        """The next message; errors of the page are kept, events noted."""
        deadline = time.monotonic() + 60
        while b"\0" not in self._buffer:
            assert time.monotonic() < deadline, "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self._events.append(message["method"])
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
