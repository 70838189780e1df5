"""Comparing receipts: what is refused, what may be declared, and what a claim says."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands.report import REFUSED
from megacpp_mcore.errors import DataError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import page
from megacpp_mcore.observe.receipts import read
from megacpp_mcore.observe.receipts import schema as receipt_schema
from megacpp_mcore.observe.receipts.claims import KEYS, NOISE, SEVEN, Comparison, compare
from tests.observe.recorded import write_start
from tests.observe.test_page import Reader
from tests.observe.test_receipts import report

UNTOLD = "no difference in tokens/s that can be told from noise (1.00x; floor 7 %)"
STEPS = "median 2 s, 90th percentile 5 % above"


def receipt(**changes: Any) -> dict[str, Any]:
    """A valid receipt of a dense model with all that the checklist asks for; ``changes`` by path, ``__`` for a dot."""
    values: dict[str, Any] = {
        "schema": receipt_schema.SCHEMA, "status": "finished", "written_at": "", "ranks.found": [0], "ranks.expected": 1,
        "notes": [], "disqualifiers": [], "unjudged": [], "environment": {}, "pattern": "AEMR", "model.layers": "AEMR",
        "model.definition": dataclasses.asdict(preset("nam56r_tiny")), "moe_enabled": False, "batch.sequence_length": 256,
        "batch.documents": "together", "compile.mode": "off", "compile_warmup": "skipped", "compile.reason": "not-cuda",
        "compile.precompile": False, "device": "NVIDIA H200", "parallelism.sequence_parallel": False, "data.kind": "real",
        "data.checksum": "1" * 64, "data.fill_in_the_middle": False, "tokenizer.kind": "NullTokenizer",
        "tokenizer.checksum": "2" * 64, "tokenizer.vocab_size": 384, "cache.state": "warm", "batch.micro_batch_size": 1,
        "batch.global_batch_size": 8, "batch.accumulation": 8, "batch.rampup": False, "batch.effective_tokens": 2048,
        "indexer.top_k": 32, "precision.model_dtype": "bf16", "precision.kernel_fp8": "none", "precision.dispatch": "none",
        "precision.checkpoint_owner": "megatron", "precision.fp8_layers": [], "optimizer": {"name": "adam"},
        "ddp.grad_reduce_dtype": ["float32"], "step_time.n": 50,
        "step_time.p50_s": 2.0, "step_time.p90_s": 2.1, "throughput.tokens_per_s": 1000.0,
        "throughput.tokens_per_s_per_device": 1000.0, "memory.kind": "CUDA allocator",
        "memory.allocated_peak_bytes": 1000, "backends": [], "parts": [], "recompute": "full",
        "commit": "1" * 40, "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    names = ["world_size", "hosts", "tensor", "pipeline", "virtual", "expert", "context", "data"]
    values |= {f"parallelism.{name}": 1 for name in names}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    reasons = {"routing": "the model has no experts", "profiler": "the run was not profiled"}
    found = receipt_schema.Facts(values, reasons).receipt("a test")
    receipt_schema.validate(found)
    return found


def beside(found: Comparison) -> tuple[str, ...]:
    return tuple(line.describe() for line in found.differences)


def test_a_claim_of_a_dense_model() -> None:
    faster = receipt(throughput__tokens_per_s=1310.0, memory__allocated_peak_bytes=840, recompute="none")
    found = compare(receipt(), faster)
    assert found.claim == "1.31x tokens/s, 0.84x peak allocated memory"
    assert found.refusals == ()
    assert [line.key for line in found.lines] == list(KEYS)
    assert SEVEN == (
        "pattern", "routed_experts", "sequence_length", "compile_policy", "topology", "real_data", "cache_state",
    )  # fmt: skip


@pytest.mark.parametrize("rate", [1069.0, 1000.0 / 1.069])
def test_what_equal_runs_part_by_is_no_claim_about_speed(rate: float) -> None:
    found = compare(receipt(), receipt(throughput__tokens_per_s=rate, recompute="none"))
    assert found.claim == (
        f"no difference in tokens/s that can be told from noise ({rate / 1000:.2f}x; floor 7 %), 1.00x peak allocated memory"
    )
    assert (found.told_from_noise, found.tokens_per_s_ratio) == (False, rate / 1000)


@pytest.mark.parametrize("rate", [1071.0, 1000.0 / 1.071])
def test_what_is_more_is_one_whichever_is_the_baseline(rate: float) -> None:
    found = compare(receipt(), receipt(throughput__tokens_per_s=rate, recompute="none"))
    assert found.claim == f"{rate / 1000:.2f}x tokens/s, 1.00x peak allocated memory"
    assert found.step_times == f"step times: A {STEPS}; B {STEPS}; floor 7 %, by which equal runs part"


def test_steps_of_a_wide_spread_tell_less_than_one_run_each() -> None:
    """30 steps, a tenth of them twice the median: a standard deviation of 78 %, a standard error of the median of 17.85 %."""
    wide: dict[str, Any] = {"step_time__n": 30, "step_time__p90_s": 4.0}
    faster = receipt(throughput__tokens_per_s=1310.0, recompute="none")
    found = compare(receipt(**wide), faster)
    assert found.noise_floor == pytest.approx(2 * math.hypot(0.17855, 0.00692), rel=1e-3)
    assert found.claim == (
        "no difference in tokens/s that can be told from noise (1.31x; floor 35.7 %), 1.00x peak allocated memory"
    )
    assert found.step_times == (
        f"step times: A median 2 s, 90th percentile 100 % above; B {STEPS}; floor 35.7 %, 2 standard errors of these medians"
    )
    assert compare(receipt(**wide | {"step_time__n": 3000}), faster).claim == (
        "1.31x tokens/s, 1.00x peak allocated memory"
    )


def test_noise_that_was_measured_is_the_floor() -> None:
    other = receipt(throughput__tokens_per_s=1040.0, recompute="none")
    found = compare(receipt(), other, noise=0.03)
    assert found.claim == "1.04x tokens/s, 1.00x peak allocated memory"
    assert found.step_times.endswith("; floor 3 %, as given")
    assert "can be told from noise (1.04x; floor 12 %)" in str(compare(receipt(), other, noise=0.12).claim)
    spread = compare(receipt(), other, noise=0.0)  # the spread of the steps is there whatever is given
    assert spread.noise_floor == pytest.approx(2 * math.sqrt(2) * 0.00692, rel=1e-3)
    for bad in (math.nan, math.inf, -0.01):
        with pytest.raises(DataError, match=r"the noise given is .* %; expected 0 or more"):
            compare(receipt(), other, noise=bad)


def test_a_spread_that_is_not_known_is_said() -> None:
    found = compare(receipt(), receipt(step_time__p90_s=None, throughput__tokens_per_s=1310.0, recompute="none"))
    assert found.claim == "1.31x tokens/s, 1.00x peak allocated memory"
    assert found.step_times == f"step times: A {STEPS}; B not known; floor 7 %, by which equal runs part"


def test_a_tax_has_its_price_in_speed_memory_and_loss() -> None:
    free = receipt(experimental_taxes=[], loss__last=3.25)
    taxed = receipt(
        experimental_taxes=["anomaly_detection"], loss__last=3.5, throughput__tokens_per_s=620.0,
        memory__allocated_peak_bytes=1100,
    )  # fmt: skip
    assert compare(free, taxed).claim == (
        "0.62x tokens/s, 1.10x peak allocated memory, the price of experimental_taxes: A has none, B has anomaly_detection, "
        "last loss 3.2500 in A, 3.5000 in B"
    )
    assert compare(receipt(), taxed).claim is None  # whether A pays it, too, is not known


def test_equal_runs_part_by_noise_and_allow_no_claim() -> None:
    found = compare(receipt(), receipt(throughput__tokens_per_s=950.0))
    assert (found.claim, found.tokens_per_s_ratio) == (None, 0.95)
    assert found.refusals == (
        "nothing that both receipts know differs: 0.95x tokens/s, 1.00x peak allocated memory is what equal runs part by",
    )
    for rate, told in ((1100.0, "1.10x"), (900.0, "0.90x")):
        found = compare(receipt(), receipt(throughput__tokens_per_s=rate))
        assert found.refusals == (
            f"nothing that both receipts know differs: {told} tokens/s differs by more than equal runs do, and neither receipt "
            "says why; 1.00x peak allocated memory is what equal runs part by",
        )


@pytest.mark.parametrize("peak", [2000, 1060, 940])
def test_memory_that_differs_is_not_called_noise(peak: int) -> None:
    (said,) = compare(receipt(), receipt(memory__allocated_peak_bytes=peak)).refusals
    assert said == (
        f"nothing that both receipts know differs: {peak / 1000:.2f}x peak allocated memory differs by more than equal runs "
        "do, and neither receipt says why; 1.00x tokens/s is what equal runs part by"
    )
    (said,) = compare(receipt(), receipt(memory__allocated_peak_bytes=peak, throughput__tokens_per_s=1310.0)).refusals
    assert said.endswith(f"1.31x tokens/s, {peak / 1000:.2f}x peak allocated memory differs by more than equal runs do, "
                         "and neither receipt says why")  # fmt: skip


@pytest.mark.parametrize("peak", [1040, 960])
def test_memory_that_differs_by_a_few_per_cent_needs_no_reason(peak: int) -> None:
    (said,) = compare(receipt(), receipt(memory__allocated_peak_bytes=peak)).refusals
    assert said.endswith(f"1.00x tokens/s, {peak / 1000:.2f}x peak allocated memory is what equal runs part by")


PROFILED: dict[str, Any] = {"profiler__step_range": [8, 10], "profiler__phase": "steady"}


def test_memory_of_a_profiled_run_is_not_compared_with_that_of_another() -> None:
    profiled = receipt(**PROFILED, memory__allocated_peak_bytes=1700)
    for pair, which, said in (
        ((receipt(), profiled), "B", "profile: A has none, B has steps 8 to 10"),
        ((profiled, receipt()), "A", "profile: A has steps 8 to 10, B has none"),
    ):
        found = compare(*pair)
        assert found.claim == f"{UNTOLD}, memory not compared: {which} alone was profiled"
        assert found.allocated_memory_ratio is None
        assert beside(found) == (said,)


def test_memory_of_two_profiled_runs_is_compared() -> None:
    other = receipt(**PROFILED | {"profiler__step_range": [12, 14]}, memory__allocated_peak_bytes=840, recompute="none")
    found = compare(receipt(**PROFILED), other)
    assert (found.claim, found.allocated_memory_ratio) == (f"{UNTOLD}, 0.84x peak allocated memory", 0.84)
    assert beside(found) == ("recompute: A has full, B has none",)


def test_a_profile_that_cannot_be_read_is_no_profile_that_was_not_there() -> None:
    damaged = receipt(memory__allocated_peak_bytes=1700)
    damaged["unknown"]["profiler"] = "table.json: Expecting value"
    found = compare(receipt(), damaged)
    assert found.refusals == ("nothing that both receipts know differs: 1.00x tokens/s is what equal runs part by",)
    assert (found.allocated_memory_ratio, beside(found)) == (None, ("profile: not known (to B)",))
    said = compare(damaged, receipt(recompute="none")).claim
    assert said == f"{UNTOLD}, memory not compared: whether A was profiled is not known"


def test_the_reason_for_no_profile_is_that_of_an_assembled_receipt(tmp_path: Path) -> None:
    write_start(tmp_path, 1, 0)
    assert read(tmp_path)["unknown"]["profiler"] == receipt()["unknown"]["profiler"]


def test_a_claim_says_what_kind_of_memory_it_compares() -> None:
    resident: dict[str, Any] = {"memory__kind": "resident set"}
    other = receipt(**resident, memory__allocated_peak_bytes=1250, recompute="none")
    assert compare(receipt(**resident), other).claim == f"{UNTOLD}, 1.25x peak resident set"
    found = compare(receipt(device="cpu", **resident), receipt(), ["topology"])
    assert found.allocated_memory_ratio is None
    assert found.claim == (
        "no difference in tokens/s a device that can be told from noise (1.00x; floor 7 %), memory not compared: resident set "
        "in A, CUDA allocator in B, varying topology"
    )
    unsaid = receipt(memory__kind=None, recompute="none")
    assert compare(receipt(memory__kind=None), unsaid).claim == (
        f"{UNTOLD}, 1.00x peak memory, of a kind that is not known"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": "2" * 40}, "of another commit"),
        ({"versions": {"torch": "2.12.0"}}, "of other versions"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, "of another environment"),
        ({"commit": "2" * 40, "versions": {"torch": "2.12.0"}}, "of another commit, of other versions"),
        ({"commit": "2" * 40, "recompute": "none"}, "of another commit"),
        ({"commit": None, "recompute": "none"}, "of commit not known to be the same"),
    ],
)
def test_other_software_is_said_in_the_claim(changes: dict[str, Any], said: str) -> None:
    found = compare(receipt(), receipt(throughput__tokens_per_s=930.0, **changes))
    assert found.claim == f"0.93x tokens/s, 1.00x peak allocated memory, {said}"


@pytest.mark.parametrize("name", ["backends", "parts", "patches", "recompute", "overlap", "commit", "versions"])
def test_what_one_of_them_does_not_know_is_no_difference_to_claim(name: str) -> None:
    known: dict[str, Any] = {"patches": [], "overlap": []}
    found = compare(receipt(**known), receipt(**known | {name: None}))
    assert found.claim is None
    assert "nothing that both receipts know differs" in found.refusals[-1]
    assert [line.key for line in found.differences] == [name]


def test_what_differs_on_no_line_is_named_beside_the_claim() -> None:
    backend = {
        "op": "mamba3", "layer": 3, "requested": "auto", "observed": "kernel", "speed": "kernel", "slower_than_best": False,
        "reason": "",
    }  # fmt: skip
    slow = receipt(backends=[backend | {"observed": "reference"}], recompute=None)
    found = compare(slow, receipt(backends=[backend], recompute="none"))
    assert found.claim is not None
    assert beside(found) == (
        "recompute: not known (to A)",
        "backends: A has mamba3 reference, B has mamba3 kernel",
    )


def test_another_model_of_the_same_letters_is_another_pattern() -> None:
    other = receipt()
    other["model"]["definition"] = copy.deepcopy(other["model"]["definition"])
    other["model"]["definition"]["hidden_size"] = 256
    found = compare(receipt(), other)
    assert found.refusals == (
        "same pattern? pattern: A has definition hidden_size 128, B has definition hidden_size 256",
    )
    other["model"]["definition"] |= {"hidden_size": 128, "name": "renamed"}
    assert compare(receipt(recompute="none"), other).claim is not None


def test_what_is_not_known_is_not_the_same() -> None:
    other = receipt(cache__state=None)
    refused = compare(receipt(), other).refusals
    assert refused == ("same cache state? cache_state: not known (B does not know cache.state: a test)",)


def test_a_receipt_that_lacks_ranks_carries_no_claim() -> None:
    half = receipt(recompute="none") | {"ranks": {"expected": 2, "found": [0]}}
    assert compare(receipt(), half).refusals == ("B has the parts of 1 ranks; expected 2",)
    unknown = receipt(recompute="none", ranks__expected=None)
    assert compare(unknown, receipt()).refusals == ("A has the parts of 1 ranks; expected a number that is not known",)


def test_mock_data_has_no_checksum_and_may_be_declared() -> None:
    mock = {"data__kind": "mock", "data__checksum": None, "tokenizer__checksum": None, "disqualifiers": [MOCK]}
    one, other = receipt(**mock), receipt(**mock, recompute="none")
    assert compare(one, other, declared=["mock data"]).claim == (
        f"{UNTOLD}, 1.00x peak allocated memory, both with mock data"
    )
    real = receipt(data__checksum=None, recompute="none")
    assert "real_data: not known (B does not know data.checksum" in compare(receipt(), real).refusals[0]
    assert "real_data: A has data.kind mock" in compare(one, receipt()).refusals[0]


def test_refused_for_few_steps_no_speed_and_no_end() -> None:
    other = receipt(step_time__n=29, throughput__tokens_per_s=None, status="running")
    assert compare(receipt(), other).refusals == (
        "B has not finished: its status is running",
        "B has 29 measured steps; expected 30 or more",
        "B has no tokens/s: a test",
    )


MOCK = {"name": "mock data", "evidence": "the run trains on Megatron's mock data"}


def test_a_disqualifier_refuses_unless_both_carry_it_and_it_is_declared() -> None:
    one, other = receipt(disqualifiers=[MOCK]), receipt(disqualifiers=[MOCK], recompute="none")
    refused = compare(one, other)
    assert refused.refusals[0] == "A is disqualified by mock data: the run trains on Megatron's mock data"
    assert compare(one, other, declared=["mock data"]).claim == (
        f"{UNTOLD}, 1.00x peak allocated memory, both with mock data"
    )
    with pytest.raises(DataError, match="not both receipts carry it"):
        compare(one, receipt(), declared=["mock data"])
    unjudged = receipt(unjudged=[{"name": "fall-back", "reason": "backends is not known"}])
    assert compare(receipt(), unjudged).refusals == ("B could not be judged for fall-back: backends is not known",)


@pytest.mark.parametrize(
    ("varies", "declared", "said"),
    [
        (["speed"], [], "--varies 'speed' is not known; expected one of pattern"),
        (["pattern", "top_k"], [], "a claim has one declared difference at most"),
        (["precision"], [], "--varies precision: nothing varies"),
        ([], ["luck"], "--declare 'luck' is not known"),
    ],
)
def test_wrong_words_are_the_user_s_error(varies: list[str], declared: list[str], said: str) -> None:
    with pytest.raises(DataError) as raised:
        compare(receipt(), receipt(), varies, declared)
    assert said in str(raised.value)


def test_what_varies_and_is_not_known_is_refused_and_no_error(tmp_path: Path) -> None:
    """It may well differ: the runs are to be blamed, not the words."""
    other = receipt(cache__state=None)
    found = compare(receipt(), other, ["cache_state"])
    assert found.refusals == ("same cache state? cache_state: not known (B does not know cache.state: a test)",)
    for name, one in (("a", receipt()), ("b", other)):
        (tmp_path / name).write_text(json.dumps(one))
    assert report("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--varies", "cache_state") == REFUSED


def test_words_that_are_said_twice_are_said_once() -> None:
    one, other = receipt(disqualifiers=[MOCK]), receipt(disqualifiers=[MOCK], precision__kernel_fp8="experts")
    found = compare(one, other, ["precision", "precision"], ["mock data", "mock data"])
    assert found.claim == f"{UNTOLD}, 1.00x peak allocated memory, varying precision, both with mock data"
    assert (found.varies, found.declared) == ("precision", ("mock data",))


def eight(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "batch__global_batch_size": 64, "batch__effective_tokens": 8 * 2048, "throughput__tokens_per_s": 7840.0,
        "throughput__tokens_per_s_per_device": 980.0, "ranks__expected": 8, "ranks__found": list(range(8)),
        "parallelism__world_size": 8, "parallelism__data": 8,
    }  # fmt: skip
    return receipt(**values | changes)


def test_a_declared_topology_is_compared_a_replica_and_a_device() -> None:
    found = compare(receipt(), eight(), ["topology"])
    assert found.claim == (
        "no difference in tokens/s a device that can be told from noise (0.98x; floor 7 %), 1.00x peak allocated memory, "
        "varying topology"
    )
    slower = eight(throughput__tokens_per_s_per_device=800.0)
    assert compare(receipt(), slower, ["topology"]).claim == (
        "0.80x tokens/s a device, 1.00x peak allocated memory, varying topology"
    )
    strong = eight(batch__accumulation=1)
    assert (
        "batch_geometry: A has accumulation 8, B has accumulation 1"
        in compare(receipt(), strong, ["topology"]).refusals[0]
    )


def test_one_declared_difference_does_not_cover_another() -> None:
    other = receipt(precision__kernel_fp8="experts", batch__sequence_length=512)
    found = compare(receipt(), other, ["precision"])
    assert found.claim is None
    assert found.refusals == (
        "same sequence length? sequence_length: A has sequence_length 256, B has sequence_length 512",
    )


def test_balance_may_differ_a_little() -> None:
    experts: dict[str, Any] = {
        "moe_enabled": True, "routing__experts": 4, "routing__settings": {}, "routing__top_k": 2,
        "routing__expert_input": "jagged", "routing__forced_balance": False,
    }  # fmt: skip

    def told(peak: float) -> Comparison:
        other = receipt(**experts, routing__max_over_mean=peak, recompute="none")
        return compare(receipt(**experts, routing__max_over_mean=1.5), other)

    assert told(1.6).claim is not None
    assert "balance: A has max_over_mean 1.5, B has max_over_mean 1.8" in told(1.8).refusals[0]


def test_the_command_s_status_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in (
        ("a", receipt()),
        ("b", receipt(precision__kernel_fp8="experts", throughput__tokens_per_s=1310.0)),
    ):
        (tmp_path / name).write_text(json.dumps(found))
    files = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert report("compare", *files) == REFUSED
    said = capsys.readouterr().out
    assert "≠ precision: A has kernel_fp8 none, B has kernel_fp8 experts" in said
    assert "no claim:" in said
    assert report("compare", *files, "--varies", "precision") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "claim: 1.31x tokens/s, 1.00x peak allocated memory, varying precision",
        f"  step times: A {STEPS}; B {STEPS}; floor 7 %, by which equal runs part",
    ]
    assert report("compare", *files, "--varies", "precision", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["varies"], printed["tokens_per_s_ratio"]) == ("precision", 1.31)
    assert (printed["noise_floor"], printed["told_from_noise"]) == (NOISE, True)
    assert printed["step_times"].startswith(f"step times: A {STEPS}")
    (tmp_path / "b").write_text("{}")
    with pytest.raises(DataError, match=r"schema is None .*; expected 2"):
        report("compare", *files)
    with pytest.raises(DataError, match="or a receipt"):
        report("show", str(tmp_path / "missing"))


# --- On the page --------------------------------------------------------------------------------------------------------


def side_by_side(tmp_path: Path, names: tuple[str, str], *changes: dict[str, Any]) -> str:
    """The text of the page about two receipts, each in a folder of its own."""
    files = []
    for name, one in zip(names, changes, strict=True):
        files.append(tmp_path / name / "receipt.json")
        files[-1].parent.mkdir(exist_ok=True)
        files[-1].write_text(json.dumps(receipt(**one)))
    return " ".join(Reader(page.html(files)).text.split())


def test_the_command_that_declares_what_differs_is_named(tmp_path: Path) -> None:
    mock = {"disqualifiers": [MOCK]}
    command = "There is a claim where that is declared: megacpp-mcore report compare A B "
    for changes, options in (
        (({}, {"precision__kernel_fp8": "experts"}), "--varies precision."),
        ((mock, {**mock, "recompute": "none"}), "--declare 'mock data'."),
        ((mock, {**mock, "cache__state": "cold"}), "--varies cache_state --declare 'mock data'."),
        (({}, {"parallelism__world_size": 2, "ranks__expected": 2, "ranks__found": [0, 1]}), "--varies topology."),
    ):
        assert command + options in side_by_side(tmp_path, ("one", "other"), *changes)
    for hopeless in (
        {"precision__kernel_fp8": "experts", "cache__state": "cold"}, {"precision__kernel_fp8": None}, mock,
        {"precision__kernel_fp8": "experts", "step_time__n": 3}, {"recompute": "none"}, {},
    ):  # fmt: skip
        assert "compare A B" not in side_by_side(tmp_path, ("one", "other"), {}, hopeless)


def test_names_that_are_the_words_themselves_are_not_explained(tmp_path: Path) -> None:
    assert "A is one, B is other; step times:" in side_by_side(tmp_path, ("one", "other"), {}, {})
    text = side_by_side(tmp_path, ("A", "B"), {}, {})
    assert "A is A" not in text
    assert re.search(r"no claim ?step times: A median", text)
