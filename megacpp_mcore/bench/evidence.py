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

from megacpp_mcore.backends import Candidate
from megacpp_mcore.bench.table import RIGHT
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.observe.receipts.claims import NOISE

SAME = ("shape", "dtype", "device", "commit")
"""What has to be equal in the two rows."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where it is written that a backend is the faster one.

    Attributes:
        table: the file, from the root of the repository.
        row: columns and values that the backend's rows have.
        than: the same for what it is preferred to.
    """

    table: str
    row: Mapping[str, str]
    than: Mapping[str, str]

    def gain(self, root: Path) -> float:
        """How many times as fast the last such row of the backend is as the last one of the other.

        Raises:
            BenchmarkError: a row is not there, has no time, names no GPU or no commit, or has no parity that is right; the two
                differ in one of :data:`SAME`; or the gain may be noise (:data:`NOISE`).
        """
        with (root / self.table).open(newline="", encoding="utf-8") as source:
            rows = list(csv.DictReader(source))
        mine, theirs = (self._last(rows, which) for which in (self.row, self.than))
        pair = f"{self.table}: the rows with {dict(self.row)} and {dict(self.than)}"
        if apart := [f"{name} is {mine[name]!r} and {theirs[name]!r}" for name in SAME if mine[name] != theirs[name]]:
            raise BenchmarkError(f"{pair} prove nothing: {'; '.join(apart)}; expected two rows of one run")
        gain = float(theirs["ms"]) / float(mine["ms"])
        if not 1 + NOISE < gain < math.inf:
            raise BenchmarkError(
                f"{pair} are {gain:.4g}x apart; expected more than {1 + NOISE:.2f}x, for equal runs part by less "
                "(say why it is preferred in POLICIES)"
            )
        return gain

    def _last(self, rows: list[dict[str, str]], which: Mapping[str, str]) -> dict[str, str]:
        found = [row for row in rows if all(row.get(name) == value for name, value in which.items())]
        row = found[-1] if found else {}
        lacking = [name for name in ("ms", *SAME) if not row.get(name)]
        if lacking or not row["device"].startswith("NVIDIA") or row.get("parity") not in RIGHT:
            raise BenchmarkError(
                f"{self.table}: the last row with {dict(which)} has no {', '.join(lacking) or 'GPU or right result'} (device "
                f"{row.get('device')!r}, parity {row.get('parity')!r}); expected a time on an NVIDIA GPU, and parity that is "
                f"one of {', '.join(RIGHT)}"
            )
        return row


def _on_h200(op: str, name: str, work: str = "forward+backward") -> Evidence:
    mine, reference = ({"benchmark": op, "work": work, "variant": each} for each in (name, "reference"))
    return Evidence(table="experiments/results/bench_h200.csv", row=mine, than=reference)


OPS = ("mla_projection", "mla_keys", "indexer_inputs", "sparse_mla", "mamba3", "m2rnn", "routed_mlp")
"""Whose Triton kernels have rows of their own, forward and backward."""

EVIDENCE: Mapping[tuple[str, str], Evidence] = {
    ("mla", "sdpa"): _on_h200("mla", "sdpa"),
    ("indexer", "triton"): _on_h200("indexer", "triton", "forward"),
    ("indexer_grad", "triton"): _on_h200("indexer_grad", "triton", "gradient"),
    ("experts", "megacpp_mcore"): Evidence(
        table="experiments/results/bench_h200.csv",
        row={
            "benchmark": "layer_e",
            "work": "forward+backward",
            "variant": "ours (experts megacpp_mcore, router triton, routed_mlp triton)",
        },
        than={"benchmark": "layer_e", "work": "forward+backward", "variant": "stock MoELayer"},
    ),
} | {(op, "triton"): _on_h200(op, "triton") for op in OPS}
"""By op and backend, the rows that say that it is the faster one."""

_EXPERTS = (
    "No row of `bench run` has it yet. The rows of 8192 tokens took it 2.68 ms forward and backward on an H200, gather and sum "
    "inside (experiments/results/grouped_mlp_kernels_h200.txt), and the reference 33 ms without them, in another run"
)

POLICIES: Mapping[tuple[str, str], str] = {
    ("grouped_mlp", "triton"): _EXPERTS,
    ("mla_latents", "triton"): (
        "by itself the host is slower with it, 0.86 ms forward and backward in place of the reference's 0.62; in a layer it "
        "replaces four modules of Transformer Engine's, and the host takes 2.95 ms in place of 3.41, the device 2.29 in place "
        "of 2.51 (experiments/results/layer_a_h200.csv)"
    ),
    ("transformer_impl", "transformer_engine"): (
        "Megatron's default (TransformerConfig.transformer_impl, core 0.19), and what FP8 experts need; not faster: "
        "1.004x the tokens/s of local, one run each (experiments/results/train_h200.csv), which is noise"
    ),
    ("router", "triton"): (
        "one kernel each way in place of what stock launches one after another; it is in the rows of layer_e, and has none of "
        "its own yet"
    ),
    ("mla", "te"): "by name: sdpa covers every call that it covers, and comes first",
}
"""By op and backend, why it is preferred without evidence that it is the faster one."""


def lacking(candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
    """The backends that ``auto`` may prefer to a slower class and that have neither evidence nor a policy."""
    every = [candidate for candidate in candidates if not candidate.by_name]
    slowest = {op: min(one.speed for one in every if one.op == op) for op in {one.op for one in every}}
    preferred = [(one.op, one.name) for one in every if one.speed > slowest[one.op]]
    return [which for which in preferred if which not in EVIDENCE and which not in POLICIES]
