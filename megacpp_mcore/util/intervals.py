"""Unions of intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

Interval = tuple[int, int]
"""Begin and end, whole numbers of a unit such as nanoseconds."""


class Cover:
    """The union of ``intervals``: an instant that lies in several is counted once."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if end <= start:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        self._before = [0, *accumulate(end - start for start, end in zip(self._starts, self._ends, strict=True))]
        self.total = self._before[-1]
        """Units that are covered."""

    def within(self, start: int, end: int) -> int:
        """Return the units of the interval from ``start`` to ``end`` that are covered."""
        return max(0, self._up_to(end) - self._up_to(start))

    def common(self, other: Cover) -> int:
        """Return the units that ``other`` covers as well."""
        return sum(other.within(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def holds(self, instant: int) -> bool:
        """Return whether ``instant`` is covered; an interval's end is not part of it."""
        index = bisect_right(self._starts, instant) - 1
        return index >= 0 and instant < self._ends[index]

    def _up_to(self, instant: int) -> int:
        index = bisect_right(self._starts, instant) - 1
        return 0 if index < 0 else self._before[index] + min(instant, self._ends[index]) - self._starts[index]
