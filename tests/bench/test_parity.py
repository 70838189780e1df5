"""The gate of ``bench``: what computes the wrong thing gets no time and no speed-up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import backends
from megacpp_mcore.backends import Candidate, Speed
from megacpp_mcore.bench import measure, runner
from megacpp_mcore.bench.cases import dsa_indexer_memory, layers
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    BOTH,
    BOUND,
    FORWARD,
    OURS,
    PEER,
    Floor,
    Inputs,
    Problem,
    Variant,
    Verdict,
    candidates,
    differentiable,
)
from megacpp_mcore.bench.registry import BENCHMARKS, TINY, Options
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.ops.m2rnn.reference import m2rnn
from megacpp_mcore.ops.mamba3.reference import mamba3

QUICK: dict[str, Any] = {"device": "cpu", "dtype": "float32", "seconds": 0.0}


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with measure.one_process("cpu"):
        yield


def run(name: str, **options: Any) -> runner.Outcome:
    one = BENCHMARKS[name]
    chosen = Options(**QUICK, shape=one.shapes[TINY], **options)
    return runner.run(one, chosen, lambda line: None)


def inject(monkeypatch: pytest.MonkeyPatch, op: str, fn: Callable[..., Any]) -> None:
    """A backend called ``injected`` that ``auto`` prefers."""
    known = backends.own_candidates()
    ours = Candidate(name="injected", op=op, speed=Speed.KERNEL, load=lambda: fn)
    for module in (backends, backends.candidates, layers):
        monkeypatch.setattr(module, "own_candidates", lambda: (*known, ours))


def wrong(*inputs: Any, factor: float = 1.01, **options: Any) -> Any:
    y, state = m2rnn(*inputs, **options)
    y = y.clone()
    y[0, -1] *= factor  # one row of many
    return y, state


# --- injected ops -------------------------------------------------------------------------------------------------------


def test_a_wrong_op_gets_no_time_and_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "m2rnn", wrong)
    found = run("m2rnn")
    rows = [row for row in found.rows if row["variant"] == "injected"]
    assert [row["work"] for row in rows] == [FORWARD, BOTH]
    for row in rows:
        assert row["ms"] == row["speed_up"] == row["against"] == ""
        assert row["parity"].startswith("FAILS: worst row y 1.0e-02 > 1.0e-04")
    (failure,) = found.failures
    assert failure.startswith("m2rnn: injected FAILS")
    assert all(row["parity"] == "green" and row["ms"] for row in found.rows if row["variant"] == "reference")


def test_a_wrong_op_fails_the_layer_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("layer_r").failures == []
    inject(monkeypatch, "m2rnn", partial(wrong, factor=2.0))
    found = run("layer_r")
    (failure,) = found.failures
    assert failure.startswith("layer_r: ours (m2rnn injected) FAILS: worst row out")
    assert {row["ms"] for row in found.rows} == {""}


def test_wrong_gradients_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(*inputs: Any, **options: Any) -> Any:
        y, state = m2rnn(*inputs, **options)
        return y.detach() + (y - y.detach()) / 2, state

    inject(monkeypatch, "m2rnn", halved)
    (failure,) = run("m2rnn").failures
    assert "du 5.0e-01" in failure
    assert "y " not in failure.partition("FAILS: ")[2].removeprefix("worst row ")


def test_an_op_that_raises_is_a_failure_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no\nsuch kernel")

    inject(monkeypatch, "m2rnn", broken)
    found = run("m2rnn")
    assert found.failures == ["m2rnn: injected FAILS: it raised RuntimeError: no such kernel"]
    assert any(row["ms"] for row in found.rows)


def test_a_layer_on_references_is_called_that_and_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("layer_r", "layer_e"):
        (ours,) = [row for row in run(name).rows if row["side"] == OURS and row["work"] == BOTH]
        assert (ours["parity"], ours["ms"] != "", ours["worst_row"] != "") == ("is the reference", True, True)
        assert ours["speed_up"] == ours["against"] == ""
    inject(monkeypatch, "m2rnn", m2rnn)
    assert {row["parity"] for row in run("layer_r").rows if row["side"] == OURS} == {"green"}


def test_a_layers_peer_has_the_core_attention_of_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    built: dict[bool, Any] = {}

    def build(plan: Any, requests: Any, *, stock_core: bool = False) -> Any:
        made = real(plan, requests, stock_core=stock_core)
        built[stock_core] = made.module.self_attention.core_attention
        return made

    real = layers._build
    monkeypatch.setattr(layers, "_build", build)
    one = BENCHMARKS["layer_a_full"]
    list(layers.layer_a_full(Options(**QUICK, shape=one.shapes[TINY])))
    assert type(built[True]) is DotProductAttention
    assert not isinstance(built[False], DotProductAttention)


# --- made-up problems -----------------------------------------------------------------------------------------------------


def problem(*variants: Variant, **fields: Any) -> Problem:
    leaf = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = Inputs(leaves={"x": leaf}, cotangents=(torch.ones(6, 4),))

    def truth(given: Inputs) -> list[torch.Tensor]:
        double = given.in_double().leaves["x"]
        return [2 * double, torch.full_like(double, 2.0)]

    floor = Floor(operations=1, moved=1, precision="fp32")
    given: dict[str, Any] = {
        "shape": {"x": 6},
        "dtype": "float32",
        "inputs": inputs,
        "works": {FORWARD: floor, BOTH: floor},
        "judge": AgainstTruth(truth, ("y", "dx"), 1e-6, yardstick="yardstick"),
    }
    return Problem(variants=variants, **given | fields)


def times(factor: float, name: str, side: str, **more: Any) -> Variant:
    return differentiable(name, side, lambda inputs: [factor * inputs.leaves["x"]], **more)


def outcome(monkeypatch: pytest.MonkeyPatch, made: Problem) -> runner.Outcome:
    monkeypatch.setattr(runner, "problems", lambda benchmark, options: iter([made]))
    return runner.run(BENCHMARKS["mla"], Options(**QUICK, without=("unloved",)), lambda line: None)


def by_variant(found: runner.Outcome, work: str = BOTH) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in found.rows if row["work"] == work}


def test_a_speed_up_is_beside_a_peer_that_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_variant(outcome(monkeypatch, problem(times(2.1, "wrong peer", PEER), times(2, "right", OURS))))
    assert found["wrong peer"]["parity"].startswith("FAILS")
    assert (found["right"]["ms"] != "", found["right"]["speed_up"], found["right"]["against"]) == (True, "", "")
    found = by_variant(outcome(monkeypatch, problem(times(2, "peer", PEER), times(2, "right", OURS))))
    assert found["right"]["against"] == "peer"
    gain = float(found["peer"]["ms"]) / float(found["right"]["ms"])
    assert float(found["right"]["speed_up"].removesuffix("x")) == pytest.approx(gain, rel=0.02, abs=2e-3)
    assert found["peer"]["speed_up"] == ""


def test_with_a_stock_named_no_other_peer_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = (times(2, "stock", PEER), times(2, "other", PEER), times(2, "right", OURS))
    assert by_variant(outcome(monkeypatch, problem(*variants, stock="stock")))["right"]["against"] == "stock"
    assert by_variant(outcome(monkeypatch, problem(*variants[1:], stock="stock")))["right"]["against"] == ""


def test_a_wrong_peer_is_no_failure_of_the_run_and_left_out_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(
        monkeypatch, problem(times(3, "wrong", PEER), times(2, "unloved one", PEER), times(2, "ours", OURS))
    )
    assert found.failures == []
    assert by_variant(found)["unloved one"]["note"] == "left out"
    assert by_variant(found)["ours"]["speed_up"] == ""


def test_a_bound_is_timed_and_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Variant(name="bound", side=BOUND, runs={BOTH: lambda inputs: None})
    found = by_variant(outcome(monkeypatch, problem(bound, times(2, "ours", OURS))))
    assert (found["bound"]["parity"], found["bound"]["ms"] != "") == ("no parity: a bound", True)
    assert found["ours"]["against"] == ""


def test_a_peer_that_refuses_its_backward_pass_keeps_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise ValueError("G value of 8")

    peer = differentiable("peer", PEER, lambda inputs: [Refuses.apply(inputs.leaves["x"])])
    found = outcome(monkeypatch, problem(peer, times(2, "ours", OURS)))
    assert by_variant(found)["peer"]["note"] == "it raised ValueError: G value of 8"
    assert by_variant(found)["peer"]["ms"] == by_variant(found)["ours"]["speed_up"] == ""
    assert by_variant(found, FORWARD)["peer"]["parity"] == "green"
    assert by_variant(found, FORWARD)["peer"]["worst_row"] != ""
    assert (by_variant(found)["peer"]["parity"], by_variant(found)["peer"]["worst_row"]) == ("not checked", "")
    assert by_variant(found, FORWARD)["ours"]["against"] == "peer"


def test_out_of_memory_is_said_and_compared_with_computed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(inputs: Inputs) -> Any:
        raise torch.cuda.OutOfMemoryError("full")

    stock = Variant(name="stock", side=PEER, runs={BOTH: full})
    monkeypatch.setattr(measure, "peak_bytes", lambda call, device: 50)
    made = problem(stock, times(2, "ours", OURS), stock="stock", computed={"stock": 1000})
    found = by_variant(outcome(monkeypatch, made))
    assert found["stock"]["note"] == "out of memory"
    assert (found["ours"]["less_memory"], found["ours"]["against"]) == ("20x", "stock, computed")
    assert found["ours"]["speed_up"] == ""


def fills_up(side: str, *, forward: bool = False) -> Variant:
    """Its backward pass runs out of memory, or its forward pass too."""

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if forward:
                raise torch.cuda.OutOfMemoryError("full")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise torch.cuda.OutOfMemoryError("full")

    return differentiable("full", side, lambda inputs: [Full.apply(inputs.leaves["x"])])


def test_ours_out_of_memory_is_a_failure_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(monkeypatch, problem(times(2, "peer", PEER), fills_up(OURS)))
    assert found.failures == ["mla: full FAILS: out of memory"]
    rows = {work: by_variant(found, work)["full"] for work in (FORWARD, BOTH)}
    assert {work: row["note"] for work, row in rows.items()} == {
        FORWARD: "forward+backward: out of memory",
        BOTH: "out of memory",
    }
    assert {row["ms"] + row["speed_up"] for row in rows.values()} == {""}
    assert {row["parity"] for row in rows.values()} == {"FAILS: out of memory"}


def test_ours_out_of_memory_while_it_is_timed_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def peak(call: Any, device: str) -> int:
        calls.append(call.func.__name__)
        if call.func.__name__ == "both":
            raise torch.cuda.OutOfMemoryError("full")
        return 1

    monkeypatch.setattr(measure, "peak_bytes", peak)
    found = outcome(monkeypatch, problem(times(2, "ours", OURS), times(2, "peer", PEER)))
    assert found.failures == ["mla: ours FAILS: out of memory"]
    ours, peer = (by_variant(found, FORWARD)[name] for name in ("ours", "peer"))
    assert (ours["ms"], ours["peak_bytes"], ours["note"]) == ("", "", "forward+backward: out of memory")
    assert (peer["ms"] != "", peer["note"], by_variant(found)["peer"]["note"]) == (True, "", "out of memory")
    assert calls == ["<lambda>", "both"] * 2


def test_a_peer_out_of_memory_in_its_backward_pass_keeps_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(monkeypatch, problem(fills_up(PEER), times(2, "ours", OURS)))
    assert found.failures == []
    forward, both = (by_variant(found, work)["full"] for work in (FORWARD, BOTH))
    assert (forward["parity"], forward["ms"] != "", forward["note"]) == ("green", True, "")
    assert (both["ms"], both["note"], both["parity"]) == ("", "out of memory", "not checked")
    assert by_variant(found, FORWARD)["ours"]["against"] == "full"
    found = outcome(monkeypatch, problem(fills_up(PEER, forward=True), times(2, "ours", OURS)))
    assert {by_variant(found, work)["full"]["note"] for work in (FORWARD, BOTH)} == {"out of memory"}


def test_a_peer_out_of_memory_while_it_is_timed_is_green_in_no_row_of_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its peak may be known, and is no evidence."""

    def full(call: Any, device: str, seconds: float) -> tuple[float, int]:
        if call.func is peer.runs[BOTH]:
            raise torch.cuda.OutOfMemoryError("full")
        return 1.0, 1

    peer = times(2, "peer", PEER)
    monkeypatch.setattr(measure, "median_ms", full)
    monkeypatch.setattr(measure, "peak_bytes", lambda call, device: 50)
    found = outcome(monkeypatch, problem(peer, times(2, "ours", OURS)))
    both, forward = (by_variant(found, work)["peer"] for work in (BOTH, FORWARD))
    assert (both["ms"], both["peak_bytes"], both["note"], both["parity"]) == ("", "", "out of memory", "not checked")
    assert (forward["ms"], forward["parity"]) == ("1.0000", "green")


def test_a_peer_of_other_work_is_not_what_ours_is_faster_than(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripled(inputs: Inputs) -> list[torch.Tensor]:
        double = inputs.in_double().leaves["x"]
        return [3 * double, torch.full_like(double, 3.0)]

    other = times(3, "other work", PEER, truth=tripled)
    found = by_variant(outcome(monkeypatch, problem(other, times(2, "ours", OURS))))
    assert (found["other work"]["parity"], found["other work"]["ms"] != "") == ("green", True)
    assert found["ours"]["against"] == found["ours"]["speed_up"] == ""
    found = by_variant(outcome(monkeypatch, problem(other, times(2, "peer", PEER), times(2, "ours", OURS))))
    assert found["ours"]["against"] == "peer"


def test_ours_gives_every_gradient_and_a_peer_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(name: str, side: str) -> Variant:
        return times(2, name, side, results=lambda found: found[:1])

    found = outcome(monkeypatch, problem(first("peer", PEER), first("ours", OURS)))
    assert found.failures == ["mla: ours FAILS: it gives 1 results, expected at least 2"]
    assert by_variant(found)["peer"]["parity"] == "green"


def test_the_program_of_the_truth_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = times(2, "peer", PEER)
    found = outcome(monkeypatch, problem(peer, times(2, "ours", OURS, is_reference=True)))
    ours = by_variant(found)["ours"]
    assert (found.failures, ours["parity"], ours["ms"] != "") == ([], "is the reference", True)
    assert ours["speed_up"] == ours["against"] == ""
    found = outcome(monkeypatch, problem(peer, times(2.1, "ours", OURS, is_reference=True)))
    assert found.failures[0].startswith("mla: ours FAILS: worst row y")


def test_what_is_around_a_variant_is_there_whenever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, seen = [False], []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def call(inputs: Inputs) -> list[torch.Tensor]:
        seen.append(inside[0])
        return [2 * inputs.leaves["x"]]

    checked = differentiable("ours", OURS, call, around=around)
    bare = times(2, "peer", PEER)
    found = outcome(monkeypatch, problem(checked, bare))
    assert found.failures == []
    assert len(seen) > 2  # the check, and each work's time
    assert set(seen) == {True}
    assert inside == [False]


def test_candidates_of_an_op_that_the_dispatcher_does_not_know_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="no backend of op 'grouped_mlp'"):
        list(candidates("grouped_mlp", lambda fn, inputs: []))


def test_a_yardstick_loosens_what_is_allowed_but_has_to_be_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = times(2.02, "yardstick", PEER), times(2.5, "yardstick", PEER)
    assert outcome(monkeypatch, problem(near, times(2.025, "ours", OURS))).failures == []
    assert len(outcome(monkeypatch, problem(near, times(2.04, "ours", OURS))).failures) == 1
    found = outcome(monkeypatch, problem(far, times(2.025, "ours", OURS)))
    assert by_variant(found)["yardstick"]["ms"] == ""


@pytest.mark.parametrize(
    "broken", [lambda y: y[:-1], lambda y: y * float("nan"), lambda y: y * float("inf")], ids=["shape", "nan", "inf"]
)
def test_shapes_and_what_is_no_number_fail(broken: Callable[[Any], Any]) -> None:
    made = problem()
    made.judge.prepare(made.inputs)
    variant = Variant(name="ours", side=OURS, runs={FORWARD: lambda inputs: [broken(2 * inputs.leaves["x"])]})
    assert made.judge.verdict(variant, FORWARD, made.inputs).right is False
    empty = Variant(name="ours", side=OURS, runs={FORWARD: lambda inputs: []})
    assert made.judge.verdict(empty, FORWARD, made.inputs).text == "FAILS: it gives 0 results, expected at least 1"


# --- floors ---------------------------------------------------------------------------------------------------------------


def floors_of(name: str, **shape: int) -> dict[str, tuple[int, int]]:
    (made,) = runner.problems(BENCHMARKS[name], Options(**QUICK, shape=shape))
    return {work: (floor.operations, floor.moved) for work, floor in made.works.items()}


def test_floors_of_attention_and_of_the_output_layer() -> None:
    """Of 3 queries 6 pairs are causal; two multiply-adds' operations, and a backward pass is two forward passes."""
    # 2 heads, 6 pairs, products of 4 and of 2; q, k, v, o of 2 heads in 4 bytes and a log-sum-exp.
    mla = floors_of("mla", B=1, S=3, heads=2, qk=4, v=2)
    assert mla == {FORWARD: (144, 312), BOTH: (432, 912)}
    # 6 tokens; hidden and weight are read twice, and their gradients written.
    head = floors_of("linear_cross_entropy", B=2, S=3, hidden=4, vocab=8)
    assert head == {BOTH: (1152, 672)}


def test_the_indexers_floor_is_of_queries_that_have_a_choice() -> None:
    # 15 causal pairs, of which the first 2 queries have 3; 30 inputs a row, 2 keys a query.
    found = floors_of("indexer", B=1, S=5, indexer_heads=2, indexer_dim=4, topk=2)
    assert found == {FORWARD: (2 * 12 * 10, 4 * 5 * 14 + 4 * 5 * 2)}


def test_the_floor_of_the_indexers_gradient_is_of_selected_pairs() -> None:
    found = floors_of("indexer_grad", B=1, S=5, indexer_heads=2, indexer_dim=4, topk=2)
    assert found == {"gradient": (6 * 9 * 10, 2 * 4 * 5 * 14 + 8 * 5 * 2)}


def test_the_judge_of_the_selection_refuses_what_is_wrong() -> None:
    one = BENCHMARKS["indexer"]
    (piece,) = runner.problems(one, Options(**QUICK, shape=dict(one.shapes[TINY]) | {"topk": 4}))
    (ours,) = [variant for variant in piece.variants if variant.side == OURS]
    inputs = piece.inputs
    piece.judge.prepare(inputs)
    assert piece.judge.verdict(ours, FORWARD, inputs).right is not False
    (index,) = ours.runs[FORWARD](inputs)

    def twice(wrong: Any) -> None:
        wrong[0, -1, 0] = wrong[0, -1, 1]

    def future(wrong: Any) -> None:
        wrong[0, 1, 1] = 2

    def too_few(wrong: Any) -> None:
        wrong[0, -1, 0] = -1

    def second_best(wrong: Any) -> None:
        wrong[0, -1, 0] = next(key for key in range(len(wrong[0])) if key not in wrong[0, -1].tolist())

    for spoil in (twice, future, too_few, second_best):
        wrong = index.clone()
        spoil(wrong)
        spoiled = dataclasses.replace(ours, runs={FORWARD: lambda _, wrong=wrong: [wrong]})
        assert piece.judge.verdict(spoiled, FORWARD, inputs).right is False, spoil.__name__


@pytest.mark.parametrize(
    ("work", "sparse", "operations", "moved"),
    [
        ("forward", True, 84, 56 + 64),
        ("loss", True, 610, 424 + 64),
        ("loss", False, 820, 424 + 64),
        ("train", True, 778, 424 + 64 + 88),
        ("train", False, 1060, 424 + 64 + 88),
    ],
)
def test_the_floor_of_the_indexers_memory_is_of_causal_pairs(
    work: str, sparse: bool, operations: int, moved: int
) -> None:
    """Of 4 queries 10 pairs are causal, 7 with 2 keys a query; the first 2 queries select every key without a score."""
    shape = dsa_indexer_memory.Shape(S=4, B=1, H=2, D=3, A=5, K=7, N=2)
    assert shape.operations(work, sparse) == operations
    assert shape.inputs(work) + shape.outputs(work) == moved


def test_no_scores_are_needed_where_every_key_is_selected() -> None:
    shape = dsa_indexer_memory.Shape(S=4, B=1, H=2, D=3, A=5, K=7, N=9)
    assert (shape.operations("forward", True), shape.inputs("forward"), shape.outputs("forward")) == (0, 0, 128)


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_the_floor_of_the_indexers_memory_is_at_the_rate_of_its_inputs(dtype: str, precision: str) -> None:
    one = BENCHMARKS["dsa_indexer_memory"]
    made = list(runner.problems(one, Options(**QUICK | {"dtype": dtype}, shape=one.shapes[TINY])))
    assert {floor.precision for piece in made for floor in piece.works.values()} == {precision}


# --- the indexer's judge --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "says"),
    [(0, "other keys are selected"), (1, "loss "), (2, "gradient of q: worst row"), (3, "loss "), (4, "gradient of q")],
)
def test_the_judge_of_the_indexers_memory_refuses_what_is_wrong(
    number: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = BENCHMARKS["dsa_indexer_memory"]
    piece = list(runner.problems(one, Options(**QUICK, shape=dict(one.shapes[TINY]) | {"topk": 4})))[number]
    (ours,) = [variant for variant in piece.variants if variant.side == OURS]
    (work,) = piece.works
    piece.judge.prepare(piece.inputs)
    with ours.around():
        assert piece.judge.verdict(ours, work, piece.inputs) == Verdict(True, "green")

    def spoiled(*args: Any, **options: Any) -> Any:
        index, loss, gradients = real(*args, **options)
        if number == 0:
            index = index.clone()
            index[0, -1, 0] = index[0, -1, 1]  # one key twice, in one row of many
        elif number in (1, 3):
            loss = loss * 1.001
        else:
            gradients = (gradients[0].clone(), *gradients[1:])
            gradients[0][-1, 0] *= 1.05
        return index, loss, gradients

    real = dsa_indexer_memory.run
    monkeypatch.setattr(dsa_indexer_memory, "run", spoiled)
    with ours.around():
        found = piece.judge.verdict(ours, work, piece.inputs)
    assert found.right is False
    assert found.text.startswith(f"FAILS: {says}")


# --- peers that need another machine ----------------------------------------------------------------------------------------


def test_a_layers_weights_in_the_order_of_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with mamba-ssm's layout, made of the reference, computes what our M layer does."""

    class Theirs(torch.nn.Module):
        def __init__(self, width: int, **options: Any) -> None:
            super().__init__()
            self.given = options
            state, head, rank, groups = (options[name] for name in ("d_state", "headdim", "mimo_rank", "ngroups"))
            self.heads = options["expand"] * width // head
            self.parts = [self.heads * head] * 2 + [state * rank * groups] * 2 + [self.heads] * 3 + [state // 4]
            self.in_proj = torch.nn.Linear(width, sum(self.parts), bias=False)
            self.out_proj = torch.nn.Linear(self.heads * head, width, bias=False)
            shapes: dict[str, tuple[int, ...]] = {"dt_bias": (self.heads,), "D": (self.heads,)}
            shapes |= dict.fromkeys(("B_bias", "C_bias"), (self.heads, rank, state))
            shapes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), (self.heads, rank, head))
            for name, shape in shapes.items():
                self.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))
            self.B_norm, self.C_norm = torch.nn.RMSNorm(state), torch.nn.RMSNorm(state)

        def forward(self, u_BSD: torch.Tensor) -> torch.Tensor:
            z, x, b, c, dt, decay, trap, angles = self.in_proj(u_BSD.transpose(0, 1)).split(self.parts, dim=-1)
            heads, ranks = (self.heads, -1), (self.given["mimo_rank"], self.given["ngroups"], -1)
            b, c = (part.unflatten(-1, ranks).transpose(2, 3) for part in (b, c))
            y, _ = mixed(
                x.unflatten(-1, heads), z.unflatten(-1, heads), b, c, dt, decay, trap, angles,
                dt_bias=self.dt_bias, b_bias=self.B_bias, c_bias=self.C_bias,
                b_norm_weight=self.B_norm.weight, c_norm_weight=self.C_norm.weight, D=self.D,
                mimo_x=self.mimo_x, mimo_z=self.mimo_z, mimo_o=self.mimo_o,
                chunk_size=self.given["chunk_size"], A_floor=self.given.get("A_floor", 1e-4), eps=1e-5,
            )  # fmt: skip
            out: torch.Tensor = self.out_proj(y.flatten(2).transpose(0, 1))
            return out

    from megacpp_mcore.bench.cases import mamba3 as op

    mixed: Any = mamba3

    for module in (layers, op):
        monkeypatch.setattr(module, "mamba_ssm_lacking", lambda device, rank: "")
        monkeypatch.setattr(module, "mamba3_module", lambda: SimpleNamespace(Mamba3=partial(_typed, Theirs)))
    for name in ("layer_m", "mamba3"):
        rows = by_variant(run(name))
        theirs = rows["mamba-ssm MIMO"]
        assert (theirs["note"], theirs["parity"], theirs["ms"] != "") == ("", "green", True)
        ours = next(row for row in rows.values() if row["side"] == OURS and row["ms"])
        # The layer is its own truth here, and claims nothing.
        assert (ours["parity"], ours["speed_up"] != "") == {
            "layer_m": ("is the reference", False), "mamba3": ("green", True),
        }[name]  # fmt: skip


def _typed(kind: Any, width: int, **options: Any) -> Any:
    made = kind(width, **{name: value for name, value in options.items() if name not in ("device", "dtype")})
    return made


def test_layers_of_a_width_that_no_model_has_are_refused() -> None:
    one = BENCHMARKS["layer_m"]
    chosen = Options(**QUICK, shape={**one.shapes[TINY], "hidden": 100})
    with pytest.raises(BenchmarkError, match=r"hidden is 100; expected the width of a model: 3584 \(nam56r\)"):
        runner.run(one, chosen, lambda line: None)


def test_a_benchmark_that_cannot_be_built_leaves_the_others_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(benchmark: Any, options: Options, say: Any) -> runner.Outcome:
        if benchmark.name == "mla":
            raise RuntimeError("no room")
        return real(benchmark, options, say)

    real = runner.run
    monkeypatch.setattr(runner, "run", stopped)
    monkeypatch.setattr(measure, "one_process", lambda device: contextlib.nullcontext())
    words = ["--device", "cpu", "--size", "tiny", "--seconds", "0"]
    assert cli.main(["bench", "run", "mla", "m2rnn", *words, "--output", str(tmp_path / "rows.csv")]) == 1
    assert "mla: it could not be run: RuntimeError: no room" in capsys.readouterr().out
    assert "m2rnn,op,B=2 S=24" in (tmp_path / "rows.csv").read_text()
