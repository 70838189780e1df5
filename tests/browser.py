"""A headless Chrome or Chromium, spoken to over a pipe with the DevTools protocol; nothing but the standard library.

The browser is the first of :data:`NAMES` on PATH, or what MEGACPP_BROWSER names. It gets a profile of its own, and no network.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VARIABLE = "MEGACPP_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
PATIENCE_S = 120.0
_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-quic",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


class BrowserError(Exception):
    """The browser did not do what was asked."""


def find() -> str | None:
    """The browser's program, or None."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a running browser, and what happened on it."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self.errors: list[str] = []
        """What it wrote to its console as an error or a warning, and exceptions."""
        self._process, self._to, self._back = process, to, back
        self._buffer = b""
        self._number = 0
        self._loaded = False
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol."""
        return self._call(method, parameters, session=self._session)

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Open a file in a window of ``width`` pixels, a phone's if it is narrow."""
        self.requests.clear()
        self.errors.clear()
        self._loaded = False
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + PATIENCE_S
        while not self._loaded:
            self._receive(until)
        self.ask("document.fonts.ready.then(() => true)")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    def colours(self, png: bytes, boxes: dict[str, list[float]]) -> dict[str, dict[str, int]]:
        """How often each colour (``r,g,b``) is in the boxes (left, top, width, height) of a picture."""
        return self.ask(
            f"""(async () => {{
              const bytes = Uint8Array.from(atob({json.dumps(base64.b64encode(png).decode())}), c => c.charCodeAt(0));
              const picture = await createImageBitmap(new Blob([bytes], {{type: 'image/png'}}));
              const canvas = new OffscreenCanvas(picture.width, picture.height).getContext('2d');
              canvas.drawImage(picture, 0, 0);
              const counts = {{}};
              for (const [name, box] of Object.entries({json.dumps(boxes)})) {{
                const [x, y, w, h] = box.map(Math.round), found = {{}};
                const data = canvas.getImageData(x, y, Math.max(1, w), Math.max(1, h)).data;
                for (let i = 0; i < data.length; i += 4) {{
                  const colour = data[i] + ',' + data[i + 1] + ',' + data[i + 2];
                  found[colour] = (found[colour] || 0) + 1;
                }}
                counts[name] = found;
              }}
              return counts;
            }})()"""
        )

    def _call(self, method: str, parameters: dict[str, Any], session: str | None) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, until: float) -> dict[str, Any]:
        """The next message; events are taken note of."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._back, 1 << 20) if ready else b""
            if not chunk:
                raise BrowserError(f"the browser does not answer; its exit status is {self._process.poll()}")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))


@contextlib.contextmanager
def running(program: str) -> Iterator[Browser]:
    """A browser, ended with the context."""
    to_browser, to = os.pipe()
    back, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        # the protocol's two ends are descriptors 3 and 4 of the browser
        shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        flags = [*_FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, *flags],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile},
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(process, to, back)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            process.wait()
            os.close(to)
            os.close(back)
