"""Progress on stderr: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_LIVE_SECONDS = 0.1
_PLAIN_SECONDS = 10.0


class Progress:
    """Counts files and bytes and shows them with the rate and the time left."""

    def __init__(self, files: int, bytes_: int, stream: TextIO | None = None) -> None:
        self.files, self.bytes = files, bytes_
        self.files_done = self.bytes_done = 0
        self._bytes_before = 0
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._last = self._start if not self._live else 0.0

    def resume(self, files: int, bytes_: int) -> None:
        """Count work that an earlier run did; the rate leaves it out."""
        self.files_done += files
        self.bytes_done += bytes_
        self._bytes_before += bytes_

    def advance(self, files: int, bytes_: int) -> None:
        """Count work just done, and show it when it is time to."""
        self.files_done += files
        self.bytes_done += bytes_
        now = time.monotonic()
        if now - self._last >= (_LIVE_SECONDS if self._live else _PLAIN_SECONDS):
            self._last = now
            self._show("")

    def finish(self) -> None:
        """Show the final state and end the line."""
        self._show("\n" if self._live else "")

    def line(self) -> str:
        """Return the state as text."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = (self.bytes_done - self._bytes_before) / seconds
        left = _clock((self.bytes - self.bytes_done) / rate) if rate > 0 else "unknown"
        return (
            f"{self.files_done}/{self.files} files  {self.bytes_done / 1e6:.1f}/{self.bytes / 1e6:.1f} MB  "
            f"{rate / 1e6:.1f} MB/s  left {left}"
        )

    def _show(self, end: str) -> None:
        text = f"\r\x1b[K{self.line()}{end}" if self._live else f"{self.line()}\n"
        self._stream.write(text)
        self._stream.flush()


def _clock(seconds: float) -> str:
    """Return ``seconds`` as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
