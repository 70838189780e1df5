"""Why ``auto`` prefers a backend to a slower class: committed rows, or a policy that says so; no torch.

A backend may be of a class above the slowest of its op, and so be what ``auto`` takes, only with an entry here. Evidence is a
row of a table in the repository, from a GPU, with its parity, that is better than a row of what the backend is preferred to
by more than noise. What is preferred for another reason has a policy, which claims no speed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megacpp_mcore.backends import Candidate
from megacpp_mcore.bench.table import GREEN, RIGHT
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.observe.receipts.claims import NOISE


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where it is written that a backend is the better one.

    Attributes:
        table: the file, from the root of the repository.
        row: columns and values that the backend's rows have.
        than: the same for what it is preferred to.
        column: the figure that says so, of which less is better.
        shape: the columns that hold shape and dtype, equal in both rows as device and commit are.
    """

    table: str
    row: Mapping[str, str]
    than: Mapping[str, str]
    column: str = "ms"
    shape: tuple[str, ...] = ("shape", "dtype")

    def gain(self, root: Path) -> float:
        """How many times better the last such row of the backend is than the last one of the other.

        Raises:
            BenchmarkError: a row is not there, has no figure, names no GPU or no commit, or has no parity that is right; the
                two differ in shape, dtype, device or commit; or the gain may be noise (:data:`NOISE`).
        """
        with (root / self.table).open(newline="", encoding="utf-8") as source:
            reader = csv.DictReader(source)
            rows, columns = list(reader), reader.fieldnames or ()
        if "parity" not in columns:
            raise BenchmarkError(
                f"{self.table} has no column parity, so that nothing says whether its rows computed the right thing; "
                "name a table of `bench run --output`"
            )
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
        gain = float(theirs[self.column]) / float(mine[self.column])
        if not 1 + NOISE < gain < math.inf:
            raise BenchmarkError(
                f"{self.table}: the row with {dict(self.row)} is {gain:.4g}x as good as the one with {dict(self.than)}; "
                f"expected more than {1 + NOISE:.2f}x, for equal runs part by less (say why it is preferred in POLICIES)"
            )
        return gain

    def _last(self, rows: list[dict[str, str]], which: Mapping[str, str]) -> dict[str, str]:
        found = [row for row in rows if all(row.get(name) == value for name, value in which.items())]
        if not found or not found[-1].get(self.column):
            raise BenchmarkError(f"{self.table} has no row with {dict(which)} and a figure for {self.column}")
        row = found[-1]
        if not row.get("device", "").startswith("NVIDIA") or not row.get("commit"):
            raise BenchmarkError(f"{self.table}: the row with {dict(which)} names no GPU, or no commit")
        if row["parity"] not in RIGHT:
            raise BenchmarkError(
                f"{self.table}: parity of the row with {dict(which)} is {row['parity']!r}, not {GREEN!r}"
            )
        return row


def _on_h200(op: str, name: str) -> Evidence:
    rows = ({"benchmark": op, "work": "forward+backward", "variant": variant} for variant in (name, "reference"))
    return Evidence(table="experiments/results/bench_h200.csv", row=next(rows), than=next(rows))


EVIDENCE: Mapping[tuple[str, str], Evidence] = MappingProxyType(
    {(op, name): _on_h200(op, name) for op, name in (("mla", "sdpa"), ("mamba3", "triton"), ("m2rnn", "triton"))}
)
"""By op and backend, the rows that say that it is the faster one."""

POLICIES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("transformer_impl", "transformer_engine"): (
            "Megatron's default (TransformerConfig.transformer_impl, core 0.19), and what FP8 experts need; not faster: "
            "1.004x the tokens/s of local, one run each (experiments/results/train_h200.csv), which is noise"
        ),
    }
)
"""By op and backend, why it is preferred without evidence that it is the faster one."""


def lacking(candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
    """The backends that ``auto`` may prefer to a slower class and that have neither evidence nor a policy."""
    every = list(candidates)
    slowest = {op: min(one.speed for one in every if one.op == op) for op in {one.op for one in every}}
    preferred = [(one.op, one.name) for one in every if one.speed > slowest[one.op]]
    return [which for which in preferred if which not in EVIDENCE and which not in POLICIES]
