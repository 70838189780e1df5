"""The parity gate of ``bench``: a wrong result gets no time and no speed-up."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore import backends
from megacpp_mcore.backends import Candidate, Speed
from megacpp_mcore.bench import measure
from megacpp_mcore.bench.cases import dsa_benchmark, layers_benchmark
from megacpp_mcore.bench.catalog import BENCHMARKS, BOUND, OURS, PEER, TINY, Options
from megacpp_mcore.bench.measure import Outcome
from megacpp_mcore.bench.problem import BOTH, FORWARD, Floor, Inputs, Problem, Variant
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.ops.m2rnn.reference import m2rnn
from tests.errors import raises

QUICK: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seconds": 0.0, "without": ("unloved",)}
LEAF = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with measure.one_process("cpu"):
        yield


def tiny(name: str, **changes: int) -> Options:
    return Options(**QUICK, shape=BENCHMARKS[name].shapes[TINY] | changes)


def run(name: str) -> Outcome:
    return measure.run(BENCHMARKS[name], tiny(name), lambda line: None)


def inject(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any]) -> None:
    """Register ``fn`` as the ``m2rnn`` backend ``injected``, which ``auto`` prefers."""
    candidates = backends.own_candidates()
    ours = Candidate(name="injected", op="m2rnn", speed=Speed.KERNEL, load=lambda: fn)
    for module in (backends, backends.candidates, layers_benchmark):
        monkeypatch.setattr(module, "own_candidates", lambda: (*candidates, ours))


def wrong(*inputs: Any, factor: float = 1.01, **options: Any) -> Any:
    y, state = m2rnn(*inputs, **options)
    y = y.clone()
    y[0, -1] *= factor  # one row of many
    return y, state


def halved(*inputs: Any, **options: Any) -> Any:
    y, state = m2rnn(*inputs, **options)
    return y.detach() + (y - y.detach()) / 2, state


def broken(*inputs: Any, **options: Any) -> Any:
    raise RuntimeError("no\nsuch kernel")


@pytest.mark.parametrize(
    ("fn", "failure"),
    [
        (wrong, "m2rnn: injected FAILS: worst row y 1.0e-02 > 1.0e-04"),
        (halved, "m2rnn: injected FAILS: worst row du 5.0e-01"),
        (broken, "m2rnn: injected FAILS: it raised RuntimeError: no such kernel"),
    ],
)
def test_a_wrong_op_gets_no_time_and_fails_the_run(
    fn: Callable[..., Any], failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, fn)
    measured = run("m2rnn")
    (line,) = measured.failures
    assert line.startswith(failure)
    rows = [row for row in measured.rows if row["variant"] == "injected"]
    assert [row["work"] for row in rows] == [FORWARD, BOTH]
    assert {row["ms"] + row["speed_up"] + row["against"] for row in rows} == {""}
    assert {f"m2rnn: injected {row['parity']}" for row in rows} == {line}
    assert all(row["parity"] == "green" and row["ms"] for row in measured.rows if row["variant"] == "reference")


def test_a_layer_is_checked_with_its_op_and_on_references_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next(row for row in run("layer_r").rows if row["side"] == OURS and row["work"] == BOTH)
    assert (ours["parity"], ours["ms"] != "", ours["worst_row"] != "") == ("is the reference", True, True)
    assert ours["speed_up"] == ours["against"] == ""
    for name, of_peer in (("layer_e", "green"), ("layer_m", "not checked")):  # M has no peer
        verdicts = {(row["side"], row["parity"]) for row in run(name).rows}
        assert verdicts == {(PEER, of_peer), (OURS, "is the reference")}
    with monkeypatch.context() as patch:
        inject(patch, m2rnn)
        assert {row["parity"] for row in run("layer_r").rows if row["side"] == OURS} == {"green"}
    inject(monkeypatch, partial(wrong, factor=2.0))
    measured = run("layer_r")
    (failure,) = measured.failures
    assert failure.startswith("layer_r: ours (")
    assert "m2rnn injected) FAILS: worst row out" in failure
    assert {row["ms"] for row in measured.rows} == {""}


def times(factor: float, name: str, side: str, **more: Any) -> Variant:
    """Return a variant that multiplies a tensor of 6 rows by ``factor``; only 2 is right."""
    return Variant.of(name, side, lambda inputs: factor * inputs.leaves["x"], **more)


def problem(*variants: Variant, stock: str = "") -> Problem:
    double, floor = LEAF.detach().double(), Floor(operations=1, moved=1, dtype="float32")
    return Problem(
        variants=variants,
        inputs=Inputs(leaves={"x": LEAF}, cotangents={"y": torch.ones(6, 4)}),
        works={FORWARD: floor, BOTH: floor},
        truth={"y": 2 * double, "dx": torch.full_like(double, 2)},
        limit=1e-6,
        yardstick="yardstick",
        stock=stock,
    )


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Return a function that runs an artificial problem with the given variants."""

    def measured(*variants: Variant, stock: str = "") -> Outcome:
        monkeypatch.setattr(measure, "load", lambda benchmark, options: problem(*variants, stock=stock))
        return measure.run(BENCHMARKS["mla"], Options(**QUICK), lambda line: None)

    return measured


def by_variant(measured: Outcome, work: str = BOTH) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in measured.rows if row["work"] == work}


PEER_OF_2, OURS_OF_2, NEAR = times(2, "peer", PEER), times(2, "ours", OURS), times(2.02, "yardstick", PEER)
STOCK, REPLAY = times(2, "stock", PEER), dataclasses.replace(times(2, "replay", OURS), is_captured=True)
FIRST: dict[str, Any] = {"results": lambda results: results[:1]}


@pytest.mark.parametrize(
    ("variants", "stock", "against", "untimed", "failures"),
    [
        ([PEER_OF_2, OURS_OF_2], "", {"ours": "peer"}, set(), []),
        # A peer that is wrong, or left out, is compared with nothing; and fails nothing.
        ([times(2.1, "peer", PEER), times(2, "unloved one", PEER), OURS_OF_2], "", {}, {"peer", "unloved one"}, []),
        # With a stock named, no other peer is compared with.
        ([STOCK, PEER_OF_2, OURS_OF_2], "stock", {"ours": "stock"}, set(), []),
        ([PEER_OF_2, OURS_OF_2], "stock", {}, set(), []),
        # A replay is compared only with replays, a bound with nothing.
        ([PEER_OF_2, OURS_OF_2, REPLAY], "", {"ours": "peer"}, set(), []),
        ([Variant(name="bound", side=BOUND, runs={BOTH: lambda inputs: None}), OURS_OF_2], "", {}, set(), []),
        # Ours give every gradient, a peer those that it has.
        (
            [times(2, "peer", PEER, **FIRST), times(2, "ours", OURS, **FIRST)],
            "", {}, {"ours"}, ["mla: ours FAILS: it gives 1 results, expected at least 2"],
        ),
        # The program of the truth is checked all the same, and claims nothing.
        ([PEER_OF_2, times(2, "ours", OURS, is_reference=True)], "", {}, set(), []),
        ([times(2.1, "ours", OURS, is_reference=True)], "", {}, {"ours"}, ["mla: ours FAILS: worst row y"]),
        # A yardstick loosens what is allowed, but has to be an implementation.
        ([NEAR, times(2.025, "ours", OURS)], "", {"ours": "yardstick"}, set(), []),
        (
            [times(2.5, "yardstick", PEER), times(2.025, "ours", OURS)],
            "", {}, {"yardstick", "ours"}, ["mla: ours FAILS: worst row y"],
        ),
    ],
)  # fmt: skip
def test_a_speed_up_is_beside_a_peer_that_is_right_too(
    variants: Sequence[Variant], stock: str, against: Any, untimed: set[str], failures: list[str],
    outcome: Callable[..., Outcome],
) -> None:  # fmt: skip
    measured = outcome(*variants, stock=stock)
    rows = by_variant(measured)
    assert {name: row["against"] for name, row in rows.items() if row["against"]} == against
    assert {name for name, row in rows.items() if not row["ms"]} == untimed
    assert len(measured.failures) == len(failures)
    assert all(line.startswith(start) for line, start in zip(measured.failures, failures, strict=True))
    for name, peer in against.items():
        gain = float(rows[peer]["ms"]) / float(rows[name]["ms"])
        assert float(rows[name]["speed_up"].removesuffix("x")) == pytest.approx(gain, rel=0.02, abs=2e-3)
    expected = {"unloved one": "left out", "bound": "no parity: a bound", "replay": "green"}
    assert {name: rows[name]["note"] or rows[name]["parity"] for name in expected if name in rows}.items() <= expected.items()


def test_a_graph_is_captured_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def stub(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (seen.append(torch.are_deterministic_algorithms_enabled()), call(*args))[1]

    monkeypatch.setattr("megacpp_mcore.bench.problem.Captured", stub)
    both = OURS_OF_2.deterministic().captured()
    assert (both.name, both.is_captured) == ("ours, deterministic, CUDA graph", True)
    assert times(2, "ours (mla sdpa)", OURS).captured().name == "ours, CUDA graph (mla sdpa)"
    results = measure.measured(problem(both), both, Options(**QUICK))
    assert [result.right for result in results.values()] == [True] * len(results)
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    with raises(BenchmarkError, "deterministic()", "captured()"):
        OURS_OF_2.captured().deterministic()


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ctx.error


def stops(side: str, error: Exception) -> Variant:
    """Return a variant that raises in its backward pass."""
    return Variant.of("stops", side, lambda inputs: Stops.apply(inputs.leaves["x"], error))


def test_without_a_backward_pass_a_peer_keeps_its_forward_pass_and_ours_nothing(
    outcome: Callable[..., Outcome],
) -> None:
    measured = outcome(stops(PEER, ValueError("G value of 8")), OURS_OF_2)
    both, forward = (by_variant(measured, work) for work in (BOTH, FORWARD))
    assert (forward["stops"]["parity"], forward["ours"]["against"]) == ("green", "stops")
    assert [both["stops"][name] for name in ("parity", "ms", "worst_row")] == ["not checked", "", ""]
    assert (both["stops"]["note"], both["ours"]["speed_up"]) == ("it raised ValueError: G value of 8", "")
    measured = outcome(PEER_OF_2, stops(OURS, torch.cuda.OutOfMemoryError("full")))
    assert measured.failures == ["mla: stops FAILS: out of memory"]
    rows = [by_variant(measured, work)["stops"] for work in (FORWARD, BOTH)]
    assert [row["note"] for row in rows] == ["forward+backward: out of memory", "out of memory"]
    assert {(row["ms"] + row["speed_up"], row["parity"]) for row in rows} == {("", "FAILS: out of memory")}


@pytest.mark.parametrize("spoil", [lambda y: y[:-1], lambda y: y * float("nan"), lambda y: y * float("inf")])
def test_shapes_and_what_is_no_number_fail(spoil: Callable[[Any], Any], outcome: Callable[..., Outcome]) -> None:
    variant = Variant(name="ours", side=OURS, runs={FORWARD: lambda inputs: spoil(2 * inputs.leaves["x"])})
    assert outcome(variant).failures == ["mla: ours FAILS: worst row y inf > 1.0e-06"]


@pytest.mark.parametrize("change", ["twice", "future", "too few", "second best"])
def test_the_judge_of_the_selection_refuses_what_is_wrong(change: str) -> None:
    made = measure.load(BENCHMARKS["indexer"], tiny("indexer", topk=4))
    ours = next(variant for variant in made.variants if variant.side == OURS and variant.runs)
    assert made.check(ours, FORWARD).right is True
    index = ours.runs[FORWARD](made.inputs).clone()
    last = index[0, -1].tolist()
    second_best = next(key for key in range(len(index[0])) if key not in last)
    (row, slot), key = {"twice": ((-1, 0), last[1]), "future": ((1, 1), 2), "too few": ((-1, 0), -1)}.get(
        change, ((-1, 0), second_best)
    )
    index[0, row, slot] = key
    spoiled = dataclasses.replace(ours, runs={FORWARD: lambda _: index})
    assert made.check(spoiled, FORWARD).right is False


def test_tilelang_is_called_through_stock_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock chooses the backend; our reference replaces its kernels."""
    from megatron.core.transformer.experimental_attention_variant import dsa_tilelang_kernels

    def attend(q: Any, key: Any, index: Any, scale: float, value_dim: int, length: Any, factor: float = 1.0) -> Any:
        assert (index.dtype, length) == (torch.int32, None)
        return factor * dsa_benchmark.attend(q, key.squeeze(2), index, softmax_scale=scale, value_dim=value_dim)

    loaded = measure.load(BENCHMARKS["sparse_mla"], tiny("sparse_mla", topk=16))
    run = next(variant for variant in loaded.variants if variant.name == "reference").runs[FORWARD].func
    call, hook = partial(run, dsa_benchmark._stock_tilelang), "run_fused_absorbed_sparse_attention"
    variant = Variant.of(dsa_benchmark.TILELANG, PEER, call)
    monkeypatch.setattr(dsa_tilelang_kernels, hook, attend)
    assert [loaded.check(variant, work).right for work in (FORWARD, BOTH)] == [True, True]
    monkeypatch.setattr(dsa_tilelang_kernels, hook, partial(attend, factor=1.01))
    assert loaded.check(variant, FORWARD).right is False
    monkeypatch.setattr(dsa_tilelang_kernels, hook, lambda *call: None)
    with pytest.raises(BenchmarkError, match="TileLang"):
        loaded.check(variant, FORWARD)


def test_what_went_wrong_is_a_failure_and_the_others_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises(BenchmarkError, "hidden is 100", "3584 (nam56r)"):
        layers_benchmark.layer_m(tiny("layer_m", hidden=100))

    def stopped(benchmark: Any, options: Options, say: Any) -> Outcome:
        if benchmark.name == "mla":
            raise RuntimeError("no room")
        return real(benchmark, options, say)

    real = measure.run
    monkeypatch.setattr(measure, "run", stopped)
    monkeypatch.setattr(measure, "one_process", lambda device: contextlib.nullcontext())
    words = ["--device", "cpu", "--size", "tiny", "--seconds", "0", "--without", "xma", "unknown"]
    assert cli.main(["bench", "run", "mla", "m2rnn", *words, "--output", str(tmp_path / "rows.csv")]) == 1
    printed = capsys.readouterr().out
    assert "mla: failed to run: RuntimeError: no room" in printed
    assert "--without unknown: unknown variant; choose from reference, triton, xma" in printed
    with (tmp_path / "rows.csv").open(newline="") as source:
        notes = {row["variant"].split("'")[0]: row["note"] for row in csv.DictReader(source)}
    assert (notes["xma"], notes["reference"]) == ("left out", "")


def test_no_weight_of_a_layer_stays_its_own() -> None:
    layer = layers_benchmark.Built(torch.nn.Linear(2, 2), torch.relu, "", False)
    weight, bias = torch.randn(2, 2), torch.randn(2)
    layer.variant("ours", OURS, Inputs(leaves={"hidden": LEAF, "weight": weight, "bias": bias}))
    assert torch.equal(layer.module.weight, weight)
    assert torch.equal(layer.module.bias, bias)
    with pytest.raises(KeyError, match="bias"):
        layer.variant("ours", OURS, Inputs(leaves={"hidden": LEAF, "weight": weight}))
