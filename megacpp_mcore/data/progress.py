"""Progress of a long reading: a plain line on stderr every ten seconds, and one at the end."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_SECONDS = 10.0


class Progress:
    """Counts files and bytes and prints them with the rate and the time left."""

    def __init__(self, files: int, bytes_: int, stream: TextIO | None = None) -> None:
        self.files, self.bytes = files, bytes_
        self.files_done = self.bytes_done = 0
        self._stream = stream or sys.stderr
        self._start = self._last = time.monotonic()

    def advance(self, files: int, bytes_: int) -> None:
        """Count work just done, and print the state when it is time to."""
        self.files_done += files
        self.bytes_done += bytes_
        if time.monotonic() - self._last >= _SECONDS:
            self.show()

    def show(self) -> None:
        """Print the state."""
        self._last = time.monotonic()
        rate = self.bytes_done / max(self._last - self._start, 1e-9) / 1e6
        done, all_of_them = self.bytes_done / 1e6, self.bytes / 1e6
        left = f"{(all_of_them - done) / rate:.0f} s" if rate else "unknown"
        state = f"{self.files_done}/{self.files} files  {done:.1f}/{all_of_them:.1f} MB  {rate:.1f} MB/s  left {left}"
        print(state, file=self._stream, flush=True)
