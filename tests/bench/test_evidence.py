"""Why ``auto`` prefers a backend to a slower class: committed rows, or a policy that says so.

A backend may be of a class above the slowest of its op, and so be what ``auto`` takes, only with an entry here. Evidence is a
row of a table in the repository, from a GPU, with its parity, that is better than a row of what the backend is preferred to
by more than noise. What is preferred for another reason has a policy, which claims no speed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.backends import own_candidates
from megacpp_mcore.backends.candidates import layer_parts_candidates
from megacpp_mcore.backends.support import Support
from megacpp_mcore.bench.csv_table import GREEN
from megacpp_mcore.observe.receipts.claims import NOISE

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
SAME = ("shape", "dtype", "device", "commit")
"""What has to be equal in the two rows."""

Columns = Mapping[str, str]


def _rows(op: str, variant: str, other: str = "reference", work: str = "forward+backward") -> tuple[Columns, Columns]:
    first, second = ({"benchmark": op, "work": work, "variant": name} for name in (variant, other))
    return first, second


EVIDENCE: Mapping[tuple[str, str], tuple[Columns, Columns]] = {
    ("mla", "sdpa"): _rows("mla", "sdpa"),
    ("mla", "flash4"): _rows("mla", "flash4", "sdpa"),
    ("mla", "triton"): _rows("mla_packed", "triton", "sdpa"),
    ("routed_mlp", "quack"): _rows("routed_mlp", "quack", "triton"),
    ("indexer", "triton"): _rows("indexer", "triton", work="forward"),
    ("indexer_grad", "triton"): _rows("indexer_grad", "triton", work="gradient"),
    ("experts", "megacpp_mcore"): _rows(
        "layer_e", "ours (experts megacpp_mcore, router triton, rms_norm triton, routed_mlp triton)", "stock MoELayer"
    ),
    ("rms_norm", "triton"): _rows("rms_norm", "triton, CUDA graph", "Transformer Engine, CUDA graph"),
} | {
    (op, "triton"): _rows(op, "triton")
    for op in (
        "mla_projection", "mla_keys", "indexer_inputs", "sparse_mla", "mamba3", "m2rnn", "routed_mlp", "grouped_mlp", "router"
    )
}  # fmt: skip
"""By op and backend, the columns of its row, and of the row of what it is preferred to."""

POLICIES: Mapping[tuple[str, str], str] = {
    ("mla_latents", "triton"): (
        "by itself the host is slower with it, 0.86 ms forward and backward in place of the reference's 0.62; in a layer it "
        "replaces four modules of Transformer Engine's, and the host takes 2.95 ms in place of 3.41, the device 2.29 in place "
        "of 2.51 (experiments/results/layer_a_h200.csv)"
    ),
    ("transformer_impl", "transformer_engine"): (
        "Megatron's default (TransformerConfig.transformer_impl, core 0.19), and what FP8 experts need; not faster: "
        "1.004x the tokens/s of local, one run each (experiments/results/train_h200.csv), which is noise"
    ),
    (
        "feed_forward",
        "stock",
    ): "Megatron's own layer; the reference is the truth of triton_fp8, which runs by name alone",
    ("mla", "te"): "by name: sdpa covers every call that it covers, and comes first",
}
"""By op and backend, why it is preferred without evidence that it is the faster one."""


def _committed() -> list[dict[str, str]]:
    """Return the rows, with those of the FlashAttention-4 run last."""
    texts = ((RESULTS / f"{name}.csv").read_text(encoding="utf-8") for name in ("bench_h200", "bench_flash4_h200"))
    return [row for text in texts for row in csv.DictReader(text.splitlines())]


def test_auto_prefers_no_backend_without_evidence_or_a_policy() -> None:
    unused: Callable[..., Any] = dict
    every = [*own_candidates(), *layer_parts_candidates(transformer_engine=unused, local=unused)]
    names = {(entry.op, entry.name) for entry in every}
    every = [entry for entry in every if entry.auto]
    slowest = {op: min(entry.speed for entry in every if entry.op == op) for op in {entry.op for entry in every}}
    preferred = {(entry.op, entry.name) for entry in every if entry.speed > slowest[entry.op]}
    assert preferred <= EVIDENCE.keys() | POLICIES.keys() <= names
    assert not EVIDENCE.keys() & POLICIES.keys()


@pytest.mark.parametrize(("op", "name"), [("mla", "flash4"), ("routed_mlp", "quack")])
def test_auto_takes_other_packages_only_at_sizes_of_their_rows(op: str, name: str) -> None:
    (candidate,) = (listed for listed in own_candidates() if (listed.op, listed.name) == (op, name))
    assert isinstance(candidate.auto, Support)
    words = {"qk_dim": "qk", "v_dim": "v", "hidden": "hidden", "ffn": "expert_width", "experts": "experts"}
    sizes = dict(candidate.support.dims) | dict(candidate.auto.dims)
    sizes.pop("expert_ranks", None)  # how many of them divide the experts: one
    sizes.pop("window", None)  # rows have none
    rows = [row for row in _committed() if EVIDENCE[op, name][0].items() <= row.items()]
    assert rows
    assert {row["dtype"] for row in rows} == {*candidate.auto.dtypes} & {*candidate.support.dtypes}
    for row in rows:
        shape = dict(size.split("=") for size in row["shape"].split())
        assert {name: str(dim) for name, dim in sizes.items()} == {name: f"one of {shape[words[name]]}" for name in sizes}


@pytest.mark.parametrize(("rows", "faster", "other"), [("mla", "sdpa", "triton"), ("mla_window", "triton", "sdpa")])
def test_whole_rows_and_windows_go_to_what_is_faster_at_them(rows: str, faster: str, other: str) -> None:
    pairs = _rows(rows, other, faster)
    slow = [row for row in _committed() if pairs[0].items() <= row.items() and row["ms"]][-1]
    (fast,) = (row for row in _committed() if pairs[1].items() <= row.items() and row["commit"] == slow["commit"])
    assert float(slow["ms"]) / float(fast["ms"]) > 1 + NOISE


@pytest.mark.parametrize("which", EVIDENCE)
def test_the_rows_say_that_it_is_the_better_one(which: tuple[str, str]) -> None:
    """Its last row beats the other backend's of the same run on one GPU, both correct, by more than the noise floor."""
    rows = _committed()
    ours, others = ([row for row in rows if columns.items() <= row.items()] for columns in EVIDENCE[which])
    latest = ours[-1]
    other = [row for row in others if all(row[name] == latest[name] != "" for name in SAME)][-1]
    assert latest["device"].startswith("NVIDIA")
    assert latest["parity"] == other["parity"] == GREEN
    assert 1 + NOISE < float(other["ms"]) / float(latest["ms"]) < math.inf
