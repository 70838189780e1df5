"""Comparing receipts: what is refused, what may be declared, and what a claim says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.commands.report import REFUSED
from megacpp_mcore.errors import DataError
from megacpp_mcore.model import preset
from megacpp_mcore.observe.receipts import fields
from megacpp_mcore.observe.receipts.claims import KEYS, NOISE, NOISE_IN_GRAPHS, compare
from tests.errors import raises

Changes = dict[str, Any]
SAME_SPEED = "no difference in tokens/s beyond noise (1.00x; floor 7 %)"
SAME = f"{SAME_SPEED}, 1.00x peak allocated memory"
STEPS = "median 2 s, 90th percentile 5 % above"
NOTHING = "nothing known in both receipts differs: "
MOCK = {"disqualifiers": [{"name": "mock data", "evidence": "the run trains on Megatron's mock data"}]}
UNSUMMED = {"data__kind": "mock", "data__checksum": None, "tokenizer__checksum": None}
PROFILED = {"profiler__step_range": [8, 10], "profiler__phase": "steady"}
RESIDENT = {"memory__kind": "resident set"}
FP8 = {"precision__kernel_fp8": "experts"}
BACKEND = {
    "op": "mamba3", "layers": "3", "requested": "auto", "observed": "kernel", "speed": "kernel", "slower_than_best": False,
    "reason": "",
}  # fmt: skip
EXPERTS = {
    "moe_enabled": True, "routing__experts": 4, "routing__settings": {}, "routing__top_k": 2, "recompute": None,
    "routing__expert_input": "jagged", "routing__forced_balance": False, "routing__max_over_mean": 1.5,
}  # fmt: skip
EIGHT = {
    "batch__global_batch_size": 64, "batch__effective_tokens": 8 * 2048, "throughput__tokens_per_s": 7840.0,
    "throughput__tokens_per_s_per_device": 980.0, "ranks__expected": 8, "ranks__found": list(range(8)),
    "parallelism__world_size": 8, "parallelism__data": 8, "optimizer": {"name": "adam", "distributed": True},
}  # fmt: skip


def rate(tokens_per_s: float, **changes: Any) -> Changes:
    return {"throughput__tokens_per_s": tokens_per_s, "recompute": "none", **changes}


def receipt(**changes: Any) -> dict[str, Any]:
    """Return a valid receipt of a dense model with every field of the checklist; ``changes`` by path, ``__`` for a dot."""
    values: dict[str, Any] = {
        "schema": fields.SCHEMA, "status": "finished", "written_at": "", "ranks.found": [0], "ranks.expected": 1,
        "notes": [], "disqualifiers": [], "unjudged": [], "environment": {}, "pattern": "AEMR", "model.layers": "AEMR",
        "model.definition": preset("nam56r_tiny").record(), "moe_enabled": False, "batch.sequence_length": 256,
        "batch.documents": "together", "compile.mode": "off", "compile_warmup": "skipped", "compile.reason": "",
        "compile.precompile": False, "device": "NVIDIA H200", "parallelism.sequence_parallel": False, "data.kind": "real",
        "data.checksum": "1" * 64, "data.fill_in_the_middle": False, "tokenizer.kind": "NullTokenizer",
        "tokenizer.checksum": "2" * 64, "tokenizer.vocab_size": 384, "cache.state": "warm", "batch.micro_batch_size": 1,
        "batch.global_batch_size": 8, "batch.accumulation": 8, "batch.rampup": False, "batch.effective_tokens": 2048,
        "indexer.top_k": 32, "precision.model_dtype": "bf16", "precision.kernel_fp8": "none", "precision.dispatch": "none",
        "precision.checkpoint_owner": "megatron", "precision.fp8_layers": [],
        "optimizer": {"name": "adam", "distributed": False},
        "ddp.grad_reduce_dtype": ["float32"], "step_time.n": 50, "step_time.p50_s": 2.0, "step_time.p90_s": 2.1,
        "throughput.tokens_per_s": 1000.0, "throughput.tokens_per_s_per_device": 1000.0, "memory.kind": "CUDA allocator",
        "memory.allocated_peak_bytes": 1000, "backends": [], "recompute": "full", "commit": "1" * 40,
        "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    names = ["world_size", "hosts", "tensor", "pipeline", "virtual", "expert", "context", "data"]
    values |= {f"parallelism.{name}": 1 for name in names}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    reasons = {"routing": "the model has no experts", "profiler": "the run was not profiled"}
    record = fields.Facts(values, reasons).receipt("a test")
    fields.validate(record)
    return record


@pytest.mark.parametrize(
    ("key", "path", "value"),
    [(field.compare, field.path, {
        "size": 2, "count": 7, "amount": 9.0, "flag": True, "text": "other", "list of text": ["bf16"], "list of count": [7],
        "map of value": {"name": "sgd"}}.get(field.kind.words, field.kind.words))
        for field in fields.FIELDS if field.compare in KEYS],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_every_field_of_a_line_refuses_the_claim_unless_its_line_is_declared(key: str, path: str, value: Any) -> None:
    """Each is changed to another value of its kind: of texts to choose from, to the last, or else the first."""
    baseline, name = receipt(**EXPERTS | {"recompute": "full"}), path.replace(".", "__")
    original = fields.flatten(baseline)[path]
    if isinstance(value, str) and value.startswith("one of"):
        value = next(word for word in reversed(re.findall("`(.*?)`", value)) if word != original)
    changed = receipt(**EXPERTS | {"recompute": "none", name: (not original) if isinstance(original, bool) else value})
    comparison = compare(baseline, changed)
    assert [line.key for line in comparison.lines if line.same is not True] == [key]
    (refusal,) = comparison.refusals
    assert f"{key}: A has " in refusal
    assert f"{path.rpartition('.')[2]} " in refusal
    if key != "topology":  # by which a replica's batch and a device's speed are compared
        assert (compare(baseline, changed, [key]).claim or "").endswith(f", varying {key}")


@pytest.mark.parametrize(
    ("first", "second", "claim"),
    [
        ({}, rate(1310.0, memory__allocated_peak_bytes=840), "1.31x tokens/s, 0.84x peak allocated memory"),
        # the run-to-run spread is no claim about speed, whichever is the baseline
        ({}, rate(1069.0), SAME.replace("1.00x; floor", "1.07x; floor")),
        ({}, rate(1000 / 1.069), SAME.replace("1.00x; floor", "0.94x; floor")),
        ({}, rate(1071.0), "1.07x tokens/s, 1.00x peak allocated memory"),
        ({}, rate(1000 / 1.071), "0.93x tokens/s, 1.00x peak allocated memory"),
        # other software
        ({}, rate(930.0, commit="2" * 40), "0.93x tokens/s, 1.00x peak allocated memory, of another commit"),
        ({}, {"environment": {"NCCL_ALGO": "Ring"}}, f"{SAME}, of another environment"),
        ({}, {"commit": "2" * 40, "versions": {"torch": "2.12.0"}}, f"{SAME}, of other versions, of another commit"),
        ({}, rate(1000, commit=None), f"{SAME}, of commit not known to be the same"),
        # a tax has its price in speed, memory and loss
        (
            {"experimental_taxes": [], "loss__last": 3.25},
            rate(620.0, experimental_taxes=["anomaly_detection"], loss__last=3.5, memory__allocated_peak_bytes=1100),
            "0.62x tokens/s, 1.10x peak allocated memory, the price of experimental_taxes: A has none, B has "
            "anomaly_detection, last loss 3.2500 in A, 3.5000 in B",
        ),
        # memory only of the same kind, and not if only one run was profiled
        ({}, {**PROFILED, "memory__allocated_peak_bytes": 1700}, f"{SAME_SPEED}, memory not compared: only B was profiled"),
        (PROFILED, {}, f"{SAME_SPEED}, memory not compared: only A was profiled"),
        (PROFILED, {**PROFILED, "recompute": "none"}, SAME),
        (RESIDENT, {**RESIDENT, "recompute": "none"}, f"{SAME_SPEED}, 1.00x peak resident set"),
        (RESIDENT, {"recompute": "none"}, f"{SAME_SPEED}, memory not compared: resident set in A, CUDA allocator in B"),
        # the name of a model, and loads that nearly are the same
        ({}, {"model__definition": preset("nam56r_tiny").record() | {"name": "x"}, "recompute": "none"}, SAME),
        (EXPERTS, {**EXPERTS, "routing__max_over_mean": 1.6, "commit": "2" * 40}, f"{SAME}, of another commit"),
    ],
)  # fmt: skip
def test_a_claim(first: Changes, second: Changes, claim: str) -> None:
    comparison = compare(receipt(**first), receipt(**second))
    assert (comparison.claim, comparison.refusals) == (claim, ())
    assert ("x tokens/s" in claim) == comparison.told_from_noise
    assert ("memory not compared" in claim) == (comparison.allocated_memory_ratio is None)


@pytest.mark.parametrize(
    ("first", "second", "refusals"),
    [
        # nothing differs that both know
        ({}, {}, [f"{NOTHING}{SAME}"]),
        ({}, {"throughput__tokens_per_s": 900.0}, [f"{NOTHING}0.90x tokens/s, 1.00x peak allocated memory"]),
        ({}, {"experimental_taxes": ["anomaly_detection"]}, [f"{NOTHING}{SAME}"]),
        ({}, {"compile__reason": "user-disabled"}, [f"{NOTHING}{SAME}"]),  # as receipts said once
        # a line differs, or is not known
        (FP8, {}, ["same precision plan? precision: A has kernel_fp8 experts, B has kernel_fp8 none"]),
        ({}, {"cache__state": None}, ["same cache state? cache_state: not known (B does not know cache.state: a test)"]),
        ({"data__checksum": None}, {}, ["same real-data path? real_data: not known (A does not know data.checksum: a test)"]),
        (
            EXPERTS, {**EXPERTS, "routing__max_over_mean": 1.8},
            ["same balance? balance: A has max_over_mean 1.5, B has max_over_mean 1.8"],
        ),
        (
            {}, {"model__definition": preset("nam56r_tiny").record() | {"hidden_size": 256}},
            ["same pattern? pattern: A has definition hidden_size 128, B has definition hidden_size 256"],
        ),
        # neither receipt supports a claim by itself
        (
            {}, {"step_time__n": 29, "throughput__tokens_per_s": None, "status": "running"},
            [
                "B has not finished: its status is running", "B has 29 measured steps; expected 30 or more",
                "B has no tokens/s: a test",
            ],
        ),
        (MOCK, {}, ["A is disqualified by mock data: the run trains on Megatron's mock data"]),
        (
            {}, {"unjudged": [{"name": "fall-back", "reason": "backends is not known"}]},
            ["B could not be judged for fall-back: backends is not known"],
        ),
        ({}, {"ranks__expected": 2}, ["B has facts of 1 ranks; expected 2"]),
    ],
)  # fmt: skip
def test_a_refusal(first: Changes, second: Changes, refusals: list[str]) -> None:
    comparison = compare(receipt(**first), receipt(**second))
    assert comparison.claim is None
    assert list(comparison.refusals[: len(refusals)]) == refusals
    assert all(NOTHING in refusal for refusal in comparison.refusals[len(refusals) :])


@pytest.mark.parametrize(
    ("first", "second", "varies", "declared", "claim"),
    [
        ({}, FP8, ["precision", "precision"], [], f"{SAME}, varying precision"),
        ({**MOCK, **UNSUMMED}, {**MOCK, **UNSUMMED, "recompute": "none"}, [], ["mock data"], f"{SAME}, both with mock data"),
        (MOCK, {**MOCK, **FP8}, ["precision"], ["mock data"] * 2, f"{SAME}, varying precision, both with mock data"),
        (
            {}, EIGHT, ["topology"], [],
            f"{SAME}, varying topology".replace("tokens/s", "tokens/s a device").replace("1.00x;", "0.98x;"),
        ),
        (
            {}, {**EIGHT, "throughput__tokens_per_s_per_device": 800.0}, ["topology"], [],
            "0.80x tokens/s a device, 1.00x peak allocated memory, varying topology",
        ),
    ],
)  # fmt: skip
def test_what_is_declared_is_said(first: Changes, second: Changes, varies: list[str], declared: list[str], claim: str) -> None:
    comparison = compare(receipt(**first), receipt(**second), varies, declared)
    assert comparison.claim == claim
    assert (comparison.varies, comparison.declared) == (varies[0] if varies else None, tuple(declared[:1]))


@pytest.mark.parametrize(
    ("second", "varies", "refusal"),
    [
        ({**FP8, "batch__sequence_length": 9}, "precision", "length: A has sequence_length 256, B has sequence_length 9"),
        ({"cache__state": None}, "cache_state", "cache_state: not known (B does not know cache.state: a test)"),
        ({**EIGHT, "batch__accumulation": 1}, "topology", "batch_geometry: A has accumulation 8, B has accumulation 1"),
    ],
)  # fmt: skip
def test_one_declared_difference_covers_no_other(second: Changes, varies: str, refusal: str) -> None:
    comparison = compare(receipt(), receipt(**second), [varies])
    (refused,) = comparison.refusals
    assert refused.endswith(refusal)


@pytest.mark.parametrize(
    ("varies", "declared", "noise", "named"),
    [
        (["speed"], [], None, "--varies 'speed'"),
        (["pattern", "top_k"], [], None, "pattern and top_k"),
        (["precision"], [], None, "--varies precision"),
        ([], ["luck"], None, "--declare 'luck'"),
        ([], ["mock data"], None, "--declare 'mock data'"),
        ([], [], math.nan, "nan %"),
        ([], [], math.inf, "inf %"),
        ([], [], -0.01, "-1 %"),
    ],
)
def test_wrong_words_are_the_user_s_error(varies: list[str], declared: list[str], noise: float | None, named: str) -> None:
    with raises(DataError, named):
        compare(receipt(**MOCK), receipt(), varies, declared, noise)


def test_steps_of_a_wide_spread_tell_less_than_one_run_each() -> None:
    """30 steps, a tenth of them twice the median: a standard deviation of 78 %, a standard error of the median of 17.85 %."""
    wide: Changes = {"step_time__n": 30, "step_time__p90_s": 4.0}
    comparison = compare(receipt(**wide), receipt(**rate(1310.0)))
    assert comparison.noise_floor == pytest.approx(2 * math.hypot(0.17855, 0.00692), rel=1e-3)
    assert (comparison.told_from_noise, comparison.tokens_per_s_ratio) == (False, 1.31)
    assert comparison.step_times == (
        f"step times: A median 2 s, 90th percentile 100 % above; B {STEPS}; floor 35.7 %, 2 standard errors of these medians"
    )
    assert compare(receipt(**wide | {"step_time__n": 3000}), receipt(**rate(1310.0))).told_from_noise
    unknown = compare(receipt(), receipt(**rate(1310.0, step_time__p90_s=None)))
    assert unknown.step_times == f"step times: A {STEPS}; B not known; floor 7 %, the run-to-run spread"


@pytest.mark.parametrize(
    ("noise", "floor", "told"), [(0.03, 0.03, True), (0.12, 0.12, False), (0.0, 2 * math.sqrt(2) * 0.00692, True)]
)
def test_noise_that_was_measured_is_the_floor_and_never_less_than_the_spread(noise: float, floor: float, told: bool) -> None:
    comparison = compare(receipt(), receipt(**rate(1040.0)), noise=noise)
    assert (comparison.noise_floor, comparison.told_from_noise) == (pytest.approx(floor, rel=1e-3), told)
    assert ("as given" in comparison.step_times) == (noise > 0)


def test_runs_in_cuda_graphs_differ_by_less() -> None:
    graphs = {"backends": [BACKEND | {"op": "cuda_graph", "observed": "local"}]}
    partly = {"backends": [*graphs["backends"], BACKEND | {"op": "cuda_graph", "observed": "none"}]}
    both = compare(receipt(**graphs), receipt(**rate(1040.0, **graphs)))
    assert (both.noise_floor, both.told_from_noise) == (NOISE_IN_GRAPHS, True)
    for other in ({}, partly):
        comparison = compare(receipt(**graphs), receipt(**rate(1040.0, **other)))
        assert (comparison.noise_floor, comparison.told_from_noise) == (NOISE, False)


@pytest.mark.parametrize("name", ["backends", "patches", "recompute", "overlap", "commit", "versions"])
def test_what_one_of_them_does_not_know_is_no_difference_to_claim(name: str) -> None:
    recorded: Changes = {"patches": [], "overlap": []}
    comparison = compare(receipt(**recorded), receipt(**recorded | {name: None}))
    assert NOTHING in comparison.refusals[-1]
    assert [(line.key, line.same) for line in comparison.differences] == [(name, None)]


def test_what_differs_on_no_line_is_named_beside_the_claim() -> None:
    slow = receipt(backends=[BACKEND | {"observed": "reference"}], recompute=None, **PROFILED)
    comparison = compare(slow, receipt(backends=[BACKEND], recompute="none"))
    assert comparison.claim is not None
    assert [line.describe() for line in comparison.differences] == [
        "recompute: not known (to A)",
        "backends: A has mamba3 reference, B has mamba3 kernel",
        "profile: A has steps 8 to 10, B has none",
    ]


MEASURED: Changes = {
    "dominant_time": "mamba", "dominant_flops": "expert", "shares__groups": {"mamba": 0.413, "expert": 0.2},
    "card__matmul_tflops_per_s": 705.2, "card__copy_bytes_per_s": 4.02e12,
}  # fmt: skip


def test_the_command_s_status_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes in (("a", {}), ("b", {**FP8, **MEASURED, "throughput__tokens_per_s": 1310.0})):
        (tmp_path / name).write_text(json.dumps(receipt(**changes)))
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["report", "compare", *files]) == REFUSED
    output = capsys.readouterr().out
    assert "≠ precision: A has kernel_fp8 none, B has kernel_fp8 experts" in output
    assert "no claim:" in output
    assert cli.main(["report", "compare", *files, "--varies", "precision"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "claim: 1.31x tokens/s, 1.00x peak allocated memory, varying precision",
        f"  step times: A {STEPS}; B {STEPS}; floor 7 %, the run-to-run spread",
        "  A: dominant share not known",
        "  B: mamba is 41.3 % of the time; card by itself 705 TFLOP/s, copies 4.02 TB/s",
    ]
    assert cli.main(["report", "compare", *files, "--varies", "precision", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["varies"], printed["tokens_per_s_ratio"]) == ("precision", 1.31)
    assert (printed["noise_floor"], printed["told_from_noise"]) == (NOISE, True)
    assert {line["key"]: line["same"] for line in printed["lines"]} == {key: key != "precision" for key in KEYS}
    (tmp_path / "b").write_text("{}")
    assert cli.main(["report", "compare", *files]) == cli.USER_ERROR
    assert re.search("schema is None .*; expected 3", capsys.readouterr().err)
