"""Intervals of time: what they cover together, and how much of one lies in others. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]
"""Begin and end, nanoseconds."""


class Cover:
    """What ``intervals`` cover together, an instant that lies in several counted once."""

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
        self._before = [0]
        for start, end in zip(self._starts, self._ends, strict=True):
            self._before.append(self._before[-1] + end - start)

    @property
    def total(self) -> int:
        """Nanoseconds that are covered."""
        return self._before[-1]

    def within(self, start: int, end: int) -> int:
        """Nanoseconds of the interval from ``start`` to ``end`` that are covered."""
        return max(0, self._up_to(end) - self._up_to(start))

    def common(self, other: Cover) -> int:
        """Nanoseconds that ``other`` covers, too."""
        return sum(other.within(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def holds(self, instant: int) -> bool:
        """Whether ``instant`` is covered, an interval's end excluded."""
        place = bisect_right(self._starts, instant) - 1
        return place >= 0 and instant < self._ends[place]

    def _up_to(self, instant: int) -> int:
        place = bisect_right(self._starts, instant) - 1
        if place < 0:
            return 0
        return self._before[place] + min(instant, self._ends[place]) - self._starts[place]
