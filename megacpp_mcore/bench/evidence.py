"""The committed rows on which ``auto`` prefers a backend to a slower class; no torch.

A backend may be of a class above the slowest of its op, and so be what ``auto`` takes, only with an entry here: a row of a
table in the repository, from a GPU, of a run in which its parity was checked, beside a row of what it is preferred to.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megacpp_mcore.backends import Candidate
from megacpp_mcore.bench.table import GREEN, RIGHT
from megacpp_mcore.errors import BenchmarkError


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where it is written that a backend is the better one.

    Attributes:
        table: the file, from the root of the repository.
        row: columns and values that the backend's rows have.
        than: the same for what it is preferred to.
        column: the figure that says so.
        shape: the columns that hold shape and dtype, equal in both rows as device and commit are.
        more: whether more of it is better.
    """

    table: str
    row: Mapping[str, str]
    than: Mapping[str, str]
    column: str
    shape: tuple[str, ...] = ("shape", "dtype")
    more: bool = False

    def gain(self, root: Path) -> float:
        """How many times better the last such row of the backend is than the last one of the other.

        Raises:
            BenchmarkError: a row is not there, has no figure, names no GPU or no commit, or is not right by its parity; or
                the two differ in shape, dtype, device or commit.
        """
        with (root / self.table).open(newline="", encoding="utf-8") as source:
            rows = list(csv.DictReader(source))
        mine, theirs = (self._last(rows, which) for which in (self.row, self.than))
        apart = [
            f"{name} is {mine.get(name) or 'not given'} and {theirs.get(name) or 'not given'}"
            for name in (*self.shape, "device", "commit")
            if not mine.get(name) or mine.get(name) != theirs.get(name)
        ]
        if apart:
            raise BenchmarkError(
                f"{self.table}: the rows with {dict(self.row)} and {dict(self.than)} prove nothing beside each other: "
                f"{'; '.join(apart)}; name two rows of one run"
            )
        ours, other = float(mine[self.column]), float(theirs[self.column])
        return ours / other if self.more else other / ours

    def _last(self, rows: list[dict[str, str]], which: Mapping[str, str]) -> dict[str, str]:
        found = [row for row in rows if all(row.get(name) == value for name, value in which.items())]
        if not found or not found[-1].get(self.column):
            raise BenchmarkError(f"{self.table} has no row with {dict(which)} and a figure for {self.column}")
        row = found[-1]
        if not row.get("device", "").startswith("NVIDIA") or not row.get("commit"):
            raise BenchmarkError(f"{self.table}: the row with {dict(which)} names no GPU, or no commit")
        if row.get("parity", GREEN) not in RIGHT:
            raise BenchmarkError(
                f"{self.table}: parity of the row with {dict(which)} is {row['parity']!r}, not {GREEN!r}"
            )
        return row


EVIDENCE: Mapping[tuple[str, str], Evidence] = MappingProxyType(
    {
        ("mla", "sdpa"): Evidence(
            table="benchmarks/results/mla_core_attention_h200.csv",
            row={"variant": "ours", "implementation": "transformer_engine"},
            than={"variant": "stock", "implementation": "transformer_engine"},
            column="forward_backward_ms",
            shape=("batch", "length", "heads", "qk_width", "v_width", "dtype"),
        ),
        ("transformer_impl", "transformer_engine"): Evidence(
            table="benchmarks/results/train_h200.csv",
            row={"label": "quarter_te_bf16"},
            than={"label": "quarter_local_bf16"},
            column="tokens_per_s",
            shape=("model", "precision", "tokens_per_step", "micro_batch"),
            more=True,
        ),
    }
)
"""By op and backend."""


def lacking(candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
    """The backends that ``auto`` may prefer to a slower class and that have no entry."""
    every = list(candidates)
    slowest = {op: min(one.speed for one in every if one.op == op) for op in {one.op for one in every}}
    return [(one.op, one.name) for one in every if one.speed > slowest[one.op] and (one.op, one.name) not in EVIDENCE]
