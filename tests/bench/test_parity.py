"""The gate of ``bench``: what computes the wrong thing gets no time and no speed-up."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore import backends
from megacpp_mcore.backends import Candidate, ProbeResult, Speed
from megacpp_mcore.bench import measure, runner
from megacpp_mcore.bench.cases import dsa_indexer_memory, layers, peers, sparse_mla
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import BOTH, FORWARD, Floor, Inputs, Problem, Variant
from megacpp_mcore.bench.registry import BENCHMARKS, BOUND, OURS, PEER, TINY, Options
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.ops.m2rnn.reference import m2rnn

QUICK: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seconds": 0.0}
Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with measure.one_process("cpu"):
        yield


def run(name: str) -> runner.Outcome:
    one = BENCHMARKS[name]
    return runner.run(one, Options(**QUICK, shape=one.shapes[TINY]), lambda line: None)


def by_variant(found: runner.Outcome, work: str = BOTH) -> dict[str, Row]:
    return {row["variant"]: row for row in found.rows if row["work"] == work}


# --- injected ops -------------------------------------------------------------------------------------------------------


def inject(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any]) -> None:
    """A backend of ``m2rnn`` called ``injected`` that ``auto`` prefers."""
    known = backends.own_candidates()
    ours = Candidate(name="injected", op="m2rnn", speed=Speed.KERNEL, load=lambda: fn)
    for module in (backends, backends.candidates, layers):
        monkeypatch.setattr(module, "own_candidates", lambda: (*known, ours))


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
    found = run("m2rnn")
    (line,) = found.failures
    assert line.startswith(failure)
    rows = [row for row in found.rows if row["variant"] == "injected"]
    assert [row["work"] for row in rows] == [FORWARD, BOTH]
    for row in rows:
        assert row["ms"] == row["speed_up"] == row["against"] == ""
        assert f"m2rnn: injected {row['parity']}" == line
    assert all(row["parity"] == "green" and row["ms"] for row in found.rows if row["variant"] == "reference")


def test_a_layer_is_checked_with_its_op_and_on_references_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = next(row for row in run("layer_r").rows if row["side"] == OURS and row["work"] == BOTH)
    assert (ours["parity"], ours["ms"] != "", ours["worst_row"] != "") == ("is the reference", True, True)
    assert ours["speed_up"] == ours["against"] == ""
    assert {(row["side"], row["parity"]) for row in run("layer_e").rows} == {
        (PEER, "green"),
        (OURS, "is the reference"),
    }
    with monkeypatch.context() as patch:
        inject(patch, m2rnn)
        assert {row["parity"] for row in run("layer_r").rows if row["side"] == OURS} == {"green"}
    inject(monkeypatch, partial(wrong, factor=2.0))
    found = run("layer_r")
    (failure,) = found.failures
    assert failure.startswith("layer_r: ours (")
    assert "m2rnn injected) FAILS: worst row out" in failure
    assert {row["ms"] for row in found.rows} == {""}


def test_a_layers_peer_has_the_core_attention_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    built: dict[bool, Any] = {}

    def build(plan: Any, requests: Any, *, stock_core: bool = False) -> Any:
        made = real(plan, requests, stock_core=stock_core)
        built[stock_core] = made.module.self_attention.core_attention
        return made

    real = layers._build
    monkeypatch.setattr(layers, "_build", build)
    layers.layer_a_full(Options(**QUICK, shape=BENCHMARKS["layer_a_full"].shapes[TINY]))
    assert type(built[True]) is DotProductAttention
    assert not isinstance(built[False], DotProductAttention)


# --- made-up problems -----------------------------------------------------------------------------------------------------


LEAF = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def multiple(factor: float) -> dict[str, torch.Tensor]:
    double = LEAF.detach().double()
    return {"y": factor * double, "dx": torch.full_like(double, factor)}


def problem(*variants: Variant, **fields: Any) -> Problem:
    """Twice a tensor of 6 rows."""
    floor = Floor(operations=1, moved=1, precision="fp32")
    given: dict[str, Any] = {
        "inputs": Inputs(leaves={"x": LEAF}, cotangents={"y": torch.ones(6, 4)}),
        "works": {FORWARD: floor, BOTH: floor},
        "check": AgainstTruth(multiple(2), 1e-6, yardstick="yardstick"),
    }
    return Problem(variants=variants, **given | fields)


def times(factor: float, name: str, side: str, **more: Any) -> Variant:
    return Variant.of(name, side, lambda inputs: factor * inputs.leaves["x"], **more)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[..., runner.Outcome]:
    """Runs a made-up problem of these variants."""

    def measured(*variants: Variant, **fields: Any) -> runner.Outcome:
        monkeypatch.setattr(runner, "load", lambda benchmark, options: problem(*variants, **fields))
        return runner.run(BENCHMARKS["mla"], Options(**QUICK, without=("unloved",)), lambda line: None)

    return measured


Measured = Callable[..., runner.Outcome]


def test_a_speed_up_is_beside_a_peer_that_is_right_too(outcome: Measured) -> None:
    found = by_variant(outcome(times(2, "peer", PEER), times(2, "right", OURS)))
    gain = float(found["peer"]["ms"]) / float(found["right"]["ms"])
    assert float(found["right"]["speed_up"].removesuffix("x")) == pytest.approx(gain, rel=0.02, abs=2e-3)
    assert (found["right"]["against"], found["peer"]["speed_up"]) == ("peer", "")
    refused = outcome(times(2.1, "wrong peer", PEER), times(2, "unloved one", PEER), times(2, "right", OURS))
    found = by_variant(refused)
    assert refused.failures == []  # of ours
    assert found["wrong peer"]["parity"].startswith("FAILS")
    assert found["unloved one"]["note"] == "left out"
    assert (found["right"]["ms"] != "", found["right"]["speed_up"], found["right"]["against"]) == (True, "", "")


def test_with_a_stock_named_no_other_peer_is_compared_with(outcome: Measured) -> None:
    variants = (times(2, "stock", PEER), times(2, "other", PEER), times(2, "right", OURS))
    assert by_variant(outcome(*variants, stock="stock"))["right"]["against"] == "stock"
    assert by_variant(outcome(*variants[1:], stock="stock"))["right"]["against"] == ""


def test_a_replay_is_compared_with_replays_alone(outcome: Measured) -> None:
    replay = dataclasses.replace(times(2, "replay", OURS), is_captured=True)
    found = by_variant(outcome(times(2, "peer", PEER), times(2, "called", OURS), replay))
    assert (found["called"]["against"], found["replay"]["against"]) == ("peer", "")
    assert (found["replay"]["parity"], found["replay"]["ms"] != "", found["replay"]["peak_bytes"]) == (
        "green",
        True,
        "",
    )
    assert times(2, "ours (mla sdpa)", OURS).captured().name == "ours, CUDA graph (mla sdpa)"


def test_a_graph_is_captured_in_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Stub:
        def __init__(self, call: Callable[..., Any]) -> None:
            self.call = call

        def __call__(self, *given: Any) -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return self.call(*given)

    monkeypatch.setattr("megacpp_mcore.bench.problem.Captured", Stub)
    ours = times(2, "ours", OURS)
    both = ours.deterministic().captured()
    assert (both.name, both.is_captured) == ("ours, deterministic, CUDA graph", True)
    made = problem(both)
    found = runner._measure(made, both, Options(**QUICK))
    assert [result.right for result in found.values()] == [True] * len(found)
    assert set(seen) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(BenchmarkError, match=r"expected deterministic\(\) before captured\(\)"):
        ours.captured().deterministic()


def test_a_bound_is_timed_and_compared_with_nothing(outcome: Measured) -> None:
    bound = Variant(name="bound", side=BOUND, runs={BOTH: lambda inputs: None})
    found = by_variant(outcome(bound, times(2, "ours", OURS)))
    assert (found["bound"]["parity"], found["bound"]["ms"] != "") == ("no parity: a bound", True)
    assert found["ours"]["against"] == ""


def stops(side: str, error: Exception) -> Variant:
    """Its backward pass raises."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise error

    return Variant.of("stops", side, lambda inputs: Stops.apply(inputs.leaves["x"]))


def test_a_peer_without_a_backward_pass_keeps_its_forward_pass(outcome: Measured) -> None:
    found = outcome(stops(PEER, ValueError("G value of 8")), times(2, "ours", OURS))
    both, forward = (by_variant(found, work) for work in (BOTH, FORWARD))
    assert (forward["stops"]["parity"], forward["stops"]["worst_row"] != "") == ("green", True)
    assert forward["ours"]["against"] == "stops"
    assert (both["stops"]["parity"], both["stops"]["worst_row"]) == ("not checked", "")
    assert both["stops"]["note"] == "it raised ValueError: G value of 8"
    assert both["stops"]["ms"] == both["ours"]["speed_up"] == ""


def test_ours_without_a_backward_pass_has_no_time_at_all(outcome: Measured) -> None:
    found = outcome(times(2, "peer", PEER), stops(OURS, torch.cuda.OutOfMemoryError("full")))
    assert found.failures == ["mla: stops FAILS: out of memory"]
    rows = {work: by_variant(found, work)["stops"] for work in (FORWARD, BOTH)}
    assert [row["note"] for row in rows.values()] == ["forward+backward: out of memory", "out of memory"]
    assert {row["ms"] + row["speed_up"] for row in rows.values()} == {""}
    assert {row["parity"] for row in rows.values()} == {"FAILS: out of memory"}


def test_stock_out_of_memory_is_compared_with_by_its_computed_bytes(
    outcome: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(inputs: Inputs) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    stock = Variant(name="stock", side=PEER, runs={BOTH: full})
    monkeypatch.setattr(measure, "memory", lambda call, device: (50, 20))
    found = by_variant(outcome(stock, times(2, "ours", OURS), stock="stock", computed={("stock", BOTH): 1000}))
    assert found["stock"]["note"] == "out of memory"
    assert (found["ours"]["less_memory"], found["ours"]["against"]) == ("20x", "stock, computed")
    assert (found["ours"]["peak_bytes"], found["ours"]["kept_bytes"]) == (50, 20)
    assert found["ours"]["speed_up"] == ""


def test_ours_gives_every_gradient_and_a_peer_those_it_has(outcome: Measured) -> None:
    first: dict[str, Any] = {"results": lambda found: found[:1]}
    found = outcome(times(2, "peer", PEER, **first), times(2, "ours", OURS, **first))
    assert found.failures == ["mla: ours FAILS: it gives 1 results, expected at least 2"]
    assert by_variant(found)["peer"]["parity"] == "green"


def test_the_program_of_the_truth_is_checked_all_the_same(outcome: Measured) -> None:
    found = outcome(times(2, "peer", PEER), times(2, "ours", OURS, is_reference=True))
    ours = by_variant(found)["ours"]
    assert (found.failures, ours["parity"], ours["ms"] != "") == ([], "is the reference", True)
    assert ours["speed_up"] == ours["against"] == ""
    (failure,) = outcome(times(2.1, "ours", OURS, is_reference=True)).failures
    assert failure.startswith("mla: ours FAILS: worst row y")


def test_a_yardstick_loosens_what_is_allowed_but_has_to_be_an_implementation(outcome: Measured) -> None:
    near, far = times(2.02, "yardstick", PEER), times(2.5, "yardstick", PEER)
    assert outcome(near, times(2.025, "ours", OURS)).failures == []
    assert len(outcome(near, times(2.04, "ours", OURS)).failures) == 1
    assert by_variant(outcome(far, times(2.025, "ours", OURS)))["yardstick"]["ms"] == ""
    assert len(outcome(far, times(2.025, "ours", OURS)).failures) == 1  # one that is wrong allows nothing


@pytest.mark.parametrize(
    "spoil", [lambda y: y[:-1], lambda y: y * float("nan"), lambda y: y * float("inf")], ids=["shape", "nan", "inf"]
)
def test_shapes_and_what_is_no_number_fail(spoil: Callable[[Any], Any], outcome: Measured) -> None:
    one = Variant(name="ours", side=OURS, runs={FORWARD: lambda inputs: spoil(2 * inputs.leaves["x"])})
    assert outcome(one).failures == ["mla: ours FAILS: worst row y inf > 1.0e-06"]


# --- floors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "floors"),
    [
        # Of 3 queries 6 pairs are causal; 2 heads, products of 4 and of 2; q, k, v, o in 4 bytes and a log-sum-exp. A
        # backward pass is two forward passes.
        ("mla", {"B": 1, "S": 3, "heads": 2, "qk": 4, "v": 2}, {FORWARD: (144, 312), BOTH: (432, 912)}),
        # 6 tokens; hidden and weight are read twice, and their gradients written.
        ("linear_cross_entropy", {"B": 2, "S": 3, "hidden": 4, "vocab": 8}, {BOTH: (1152, 672)}),
        # 15 causal pairs, of which the first 2 queries, which have no choice, have 3; 14 inputs a row, 2 keys a query.
        (
            "indexer",
            {"B": 1, "S": 5, "indexer_heads": 2, "indexer_dim": 4, "topk": 2},
            {FORWARD: (2 * 12 * 10, 4 * 5 * 14 + 4 * 5 * 2)},
        ),
        # 9 selected pairs.
        (
            "indexer_grad",
            {"B": 1, "S": 5, "indexer_heads": 2, "indexer_dim": 4, "topk": 2},
            {"gradient": (6 * 9 * 10, 2 * 4 * 5 * 14 + 8 * 5 * 2)},
        ),
    ],
)
def test_floors(name: str, shape: dict[str, int], floors: dict[str, tuple[int, int]]) -> None:
    made = runner.load(BENCHMARKS[name], Options(**QUICK, shape=shape))
    assert {work: (floor.operations, floor.moved) for work, floor in made.works.items()} == floors


@pytest.mark.parametrize(
    ("name", "operations", "read", "written"),
    [
        ("forward", 84, 56, 64),
        ("loss, sparse loss", 610, 424, 64),
        ("loss, dense loss", 820, 424, 64),
        ("train, sparse loss", 778, 424, 64 + 88),
        ("train, dense loss", 1060, 424, 64 + 88),
    ],
)
def test_the_floor_of_the_indexers_memory_is_of_causal_pairs(
    name: str, operations: int, read: int, written: int
) -> None:
    """Of 4 queries 10 pairs are causal, 7 with 2 keys a query; the first 2 queries select every key without a score."""
    shape = {"S": 4, "B": 1, "indexer_heads": 2, "indexer_dim": 3, "heads": 5, "latent": 4, "rope": 3, "topk": 2}
    found = dsa_indexer_memory.floor(Options(dtype="bfloat16", shape=shape, device="cpu"), name)
    assert (found.operations, found.moved, found.result) == (operations, read + written, written)
    every = dsa_indexer_memory.floor(Options(dtype="bfloat16", shape=shape | {"topk": 9}, device="cpu"), "forward")
    assert (every.operations, every.moved, every.result) == (0, 128, 128)


# --- judges of selections ---------------------------------------------------------------------------------------------------


def tiny(name: str, **changes: int) -> Problem:
    return runner.load(BENCHMARKS[name], Options(**QUICK, shape={**BENCHMARKS[name].shapes[TINY], **changes}))


def ours_of(made: Problem) -> Variant:
    return next(variant for variant in made.variants if variant.side == OURS and variant.runs)


def twice(index: Any) -> None:
    index[0, -1, 0] = index[0, -1, 1]


def future(index: Any) -> None:
    index[0, 1, 1] = 2


def too_few(index: Any) -> None:
    index[0, -1, 0] = -1


def second_best(index: Any) -> None:
    index[0, -1, 0] = next(key for key in range(len(index[0])) if key not in index[0, -1].tolist())


@pytest.mark.parametrize("spoil", [twice, future, too_few, second_best])
def test_the_judge_of_the_selection_refuses_what_is_wrong(spoil: Callable[[Any], None]) -> None:
    made = tiny("indexer", topk=4)
    ours, inputs = ours_of(made), made.inputs
    assert made.check(ours, FORWARD, inputs).right is True
    index = ours.runs[FORWARD](inputs).clone()
    spoil(index)
    spoiled = dataclasses.replace(ours, runs={FORWARD: lambda _: index})
    assert made.check(spoiled, FORWARD, inputs).right is False


def test_the_judge_of_the_indexers_memory_refuses_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(inputs: Inputs, name: str, **options: Any) -> dict[str, torch.Tensor]:
        found = real(inputs, name, **options)
        if name == "forward":
            found["index"] = found["index"].clone()
            twice(found["index"])  # in one row of many
        elif "dq" not in found:
            found["loss"] = found["loss"] * 1.001
        else:
            found["dq"] = found["dq"].clone()
            found["dq"][-1, 0] *= 1.05
        return found

    made, real = tiny("dsa_indexer_memory", topk=4), dsa_indexer_memory.run
    ours, says = ours_of(made), {"forward": "selected inf", "loss": "loss 1.0e-03", "train": "dq 5.0e-02"}
    with ours.around():
        for name, (work, _) in dsa_indexer_memory.WORKS.items():
            assert made.check(ours, name, made.inputs).parity == "green", name
            with monkeypatch.context() as patch:
                patch.setattr(dsa_indexer_memory, "run", spoiled)
                found = made.check(ours, name, made.inputs)
            assert found.right is False
            assert found.parity.startswith(f"FAILS: worst row {says[work]}"), name


# --- stock's TileLang kernels of sparse_mla -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"heads": 128, "S": 4096, "topk": 2048}, ""),
        ({"topk": 9999}, ""),  # all 64 keys
        ({"heads": 56}, "heads 56 is none of 64, 128; the nearest is 64"),
        ({"latent": 64}, "qk_dim 128 is none of 576; the nearest is 576; v_dim 64 is none of 512; the nearest is 512"),
        ({"topk": 63}, "selected 63 is not a multiple of 64"),
        ({"S": 65, "topk": 9999}, "selected 65 is not a multiple of 64"),
        ({"dtype": "float32"}, "dtype float32 is none of bfloat16"),
        ({"device": "cpu"}, "it runs on cuda, not on cpu"),
    ],
)
@pytest.mark.parametrize("installed", [True, False])
def test_tilelang_runs_at_shapes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str, installed: bool
) -> None:
    monkeypatch.setattr(peers, "probe_import", lambda name: ProbeResult(installed, f"{name} is not installed"))
    shape = {"B": 1, "S": 64, "heads": 64, "latent": 512, "rope": 64, "topk": 64} | changes
    conditions = {name: shape.pop(name, value) for name, value in (("device", "cuda"), ("dtype", "bfloat16"))}
    found = sparse_mla._tilelang(Options(**conditions, shape=shape), shape["latent"] + 64, shape["latent"])
    missing = "" if installed else "no peer installed: stock TileLang (tilelang is not installed)"
    assert found.absent == (f"not here: {says}" if says else missing)


def test_tilelang_is_called_through_stock_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's own choice of a backend, with our reference in place of its kernels."""
    from megatron.core.transformer.experimental_attention_variant import dsa_tilelang_kernels

    def attend(q: Any, key: Any, index: Any, scale: float, value_dim: int, length: Any, factor: float = 1.0) -> Any:
        assert index.dtype == torch.int32
        assert length is None
        return factor * sparse_mla.attend(q, key.squeeze(2), index, softmax_scale=scale, value_dim=value_dim)

    made, hook = tiny("sparse_mla", topk=16), "run_fused_absorbed_sparse_attention"
    V, K = made.inputs.cotangents["o"].shape[-1], made.inputs.leaves["q"].shape[-1]
    call = partial(sparse_mla._stock_tilelang, softmax_scale=K**-0.5, value_dim=V)
    variant = Variant.of(sparse_mla.TILELANG, PEER, call)
    monkeypatch.setattr(dsa_tilelang_kernels, hook, attend)
    assert [made.check(variant, work, made.inputs).right for work in (FORWARD, BOTH)] == [True, True]
    monkeypatch.setattr(dsa_tilelang_kernels, hook, partial(attend, factor=1.01))
    assert made.check(variant, FORWARD, made.inputs).right is False
    monkeypatch.setattr(dsa_tilelang_kernels, hook, lambda *call: None)
    with pytest.raises(BenchmarkError, match="declined this call"):
        made.check(variant, FORWARD, made.inputs)


# --- the command --------------------------------------------------------------------------------------------------------


def test_layers_of_a_width_that_no_model_has_are_refused() -> None:
    with pytest.raises(BenchmarkError, match=r"hidden is 100; .*: 3584 \(nam56r\)"):
        tiny("layer_m", hidden=100)


def test_what_went_wrong_is_a_failure_and_the_others_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(benchmark: Any, options: Options, say: Any) -> runner.Outcome:
        if benchmark.name == "mla":
            raise RuntimeError("no room")
        return real(benchmark, options, say)

    real = runner.run
    monkeypatch.setattr(runner, "run", stopped)
    monkeypatch.setattr(measure, "one_process", lambda device: contextlib.nullcontext())
    words = ["--device", "cpu", "--size", "tiny", "--seconds", "0", "--without", "xma", "unknown"]
    assert cli.main(["bench", "run", "mla", "m2rnn", *words, "--output", str(tmp_path / "rows.csv")]) == 1
    said = capsys.readouterr().out
    assert "mla: it could not be run: RuntimeError: no room" in said
    assert "--without unknown: no variant is so called; there are reference, triton, xma" in said
    with (tmp_path / "rows.csv").open(newline="") as source:
        notes = {row["variant"].split("'")[0]: row["note"] for row in csv.DictReader(source)}
    assert (notes["xma"], notes["reference"]) == ("left out", "")
