"""Receipts: what is made of the files in a folder, the schema, and what disqualifies a run."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import events, receipts
from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.events import Log, Step
from megacpp_mcore.observe.goodput import Recorder
from megacpp_mcore.observe.receipts import claims as compare
from megacpp_mcore.observe.receipts import facts as receipt_facts
from megacpp_mcore.observe.receipts import fields as receipt_fields
from megacpp_mcore.observe.receipts.assemble import Window, measure, together, tokens_of
from tests.errors import raises
from tests.observe.recorded import LAUNCHED, SECOND, a_step, at, receipt_writer, stepped, write_profile, write_start
from tests.tiny_run import ROOT


def changed(receipt: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one field changed, which is no longer listed as unknown."""
    fresh = copy.deepcopy(receipt)
    group, _, name = path.rpartition(".")
    (fresh[group] if group else fresh)[name] = value
    fresh["unknown"].pop(path, None)
    return fresh


def window_of(run: Path, number: int, left_out: int, profiled: tuple[tuple[int, int], ...] = ()) -> Window:
    starts = [start for rank in events.read(run).values() for start in rank if start.number == number]
    return together([measure(start, left_out, profiled) for start in starts])


def test_the_window_is_of_one_start_without_its_warm_up_and_checkpoints(tmp_path: Path) -> None:
    write_start(
        tmp_path, 1, 0,
        at(0, {"startup": 1, "compile": 0.25}),
        *(stepped(0, number, 8.0, resumed_at=4, compile=0.25) for number in (5, 6)),
        stepped(0, 7, 3.0, resumed_at=4, jit=0.5),
        stepped(0, 8, 1.0, resumed_at=4, data=0.25, idle=0.25, checkpoint_save=50.0, evaluation=50.0),
        *(stepped(0, number, 40.0, resumed_at=4) for number in (9, 10, 11)),
        at(0, {"jit": 0.5}, how="finished"),
        world_size=2,
    )  # fmt: skip
    window = window_of(tmp_path, 1, 2, ((9, 11),))
    assert window.seconds == {7: 3.5, 8: 1.5}
    assert window.compiled == {7: SECOND // 2}
    assert (window.compiled_ns, window.done) == (round(1.75 * SECOND), 7)
    write_start(tmp_path, 1, 1, *(stepped(0, number, 4.0, jit=0.25) for number in (1, 2, 3)), world_size=2)
    window = window_of(tmp_path, 1, 2, ((9, 11),))
    assert (window.rank, window.compiled) == (1, {3: SECOND // 4, 7: SECOND // 2})
    assert window_of(tmp_path, 1, 7).seconds == {}


def test_a_run_that_was_stopped_is_not_finished(tmp_path: Path) -> None:
    line = "exiting program at iteration 1"
    for rank, how in ((0, "finished"), (1, "stopped")):
        write_start(tmp_path, 1, rank, stepped(1, 1), at(2, facts={"stopped": line}), at(3, {}, how=how), world_size=2)
    receipt = receipts.read(tmp_path)
    assert (receipt["status"], receipt["notes"]) == ("stopped", [f"stopped: {line}"])
    for rank in range(2):  # a start after it recovers from nothing
        write_start(tmp_path, 2, rank, stepped(6, 2, resumed_at=1, startup=1), began=4, world_size=2)
    assert receipts.read(tmp_path)["goodput"]["seconds"]["recovery"] == 0


def end(run: Path, error: BaseException | None = None) -> None:
    """A start that ends before there is a model."""
    log = Log(run, 0, 1, Clock(), heartbeat_s=60)
    listeners = [Recorder(log, with_losses=True), receipt_writer(log)]
    for listener in listeners:
        listener.on_end(error)
    log.close()


def test_a_dead_start_up_leaves_a_valid_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model was ever built: nearly all is unknown, and says why."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    end(tmp_path, MemoryError())
    receipt = receipts.read(tmp_path / "receipt.json")
    assert receipt["status"] == "MemoryError"
    assert receipt["environment"]["NCCL_ALGO"] == "Ring"
    assert receipt["pattern"] is None
    assert receipt_fields.why_unknown("pattern", receipt["unknown"]) == "rank 0 did not record it: the run ended first"
    assert {unjudged["name"] for unjudged in receipt["unjudged"]} >= {"mock data", "fall-back", "batch changed"}
    assert receipt["versions"]["torch"]


def test_shares_are_those_of_the_last_steady_profile(tmp_path: Path) -> None:
    """And not of the warm-up, though that came later."""
    end(tmp_path)
    families = {name: {"share": share} for name, share in (("E", 0.6), ("A", 0.3), ("optimizer", 0.1))}
    values = {"unit": "device time of kernels", "dominant": "E", "hidden_share": 0.75, "families": families}
    write_profile(tmp_path, 10, 14, **values)
    write_profile(tmp_path, 20, 24, phase="warm-up", **values)
    receipt = receipts.read(tmp_path)
    assert receipt["profiler"]["step_range"] == [10, 14]
    assert (receipt["dominant_time"], receipt["attention_share"]) == ("expert", 0.3)
    assert receipt["dominant_flops"] is None
    assert receipt["shares"]["source"] == (
        "profile of rank 0: device time of kernels of steps 10 to 14, communication included"
    )
    assert receipt["shares"]["groups"] == {"expert": 0.6, "attention": 0.3, "optimizer": 0.1}
    assert receipt["profiler"]["hidden_share"] == 0.75
    assert "profiler" not in receipt["unknown"]


def test_the_commit_is_the_checkout_s_or_the_variable_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr("megacpp_mcore.__file__", str(tmp_path / "__init__.py"))
    for value, expected in (("abc123", "abc123"), ("", None)):
        monkeypatch.setenv(receipt_facts.COMMIT, value)
        facts = receipt_facts.at_start(LAUNCHED)
        assert facts.values["commit"] == expected
    assert "is not in a git checkout" in facts.unknown["commit"]


NAMED = {
    "op": "mla", "layers": "4", "requested": "kernel", "observed": "reference", "speed": "reference",
    "slower_than_best": False, "reason": "disabled",
}  # fmt: skip


def bare_receipt(**values: Any) -> dict[str, Any]:
    required = {
        "schema": receipt_fields.SCHEMA, "status": "finished", "written_at": "", "ranks.found": [0], "notes": [],
        "disqualifiers": [], "unjudged": [], "environment": {},
    }  # fmt: skip
    return receipt_fields.Facts(required | values).receipt("a test")


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("schema", 2, ("schema is 2", 3)),
        ("attention_share", 1.5, ("attention_share is 1.5", "share")),
        ("step_time.p50_s", math.nan, ("step_time.p50_s is nan", "positive")),
        ("notes", None, ("notes is None",)),
        ("parallelism.tensor", True, ("parallelism.tensor is True", "size")),
        ("goodput", {}, ("goodput is {}", "rank, goodput, wall_s")),
        ("compile.mode", "hot", ("compile.mode is 'hot'", "`off`, `regional`")),
        ("data.datasets", [{"name": "a", "weight": None, "sha256": 1}], ("data.datasets is [{'name': 'a'", "'weight'")),
        ("routing.layers", {"2": {"asked": 1}}, ("routing.layers is {'2': {'asked': 1}}", "map")),
        ("flops", {"families": {}}, ("flops is {'families': {}}", "{families, by_precision, …}")),
        ("disqualifiers", [{"name": "tired", "evidence": ""}], ("disqualifiers is [{'name': 'tired'",)),
        ("profiler.step_range", [], ("profiler.step_range is []", "list of 2")),
        ("memory", 3, ("memory is",)),
        ("speed", 3, ("speed is",)),
        ("backends", [NAMED | {"layers": "4-"}], ("backends is [{'op': 'mla', 'layers': '4-'",)),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, path: str, value: Any, named: tuple[object, ...]) -> None:
    receipt = bare_receipt()
    receipt_fields.validate(receipt)
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(changed(receipt, path, value)))
    with raises(DataError, file, *named):
        receipts.read(file)


def test_what_a_terminal_obeys_is_read_as_its_escape(tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(changed(bare_receipt(), "routing.settings", {"a\x1b": ["\u202eb", "\ud800", "é\n", 3]})))
    assert receipts.read(file)["routing"]["settings"] == {r"a\x1b": [r"\u202eb", r"\ud800", "é\n", 3]}


def test_a_missing_field_and_what_is_no_object_are_wrong() -> None:
    receipt = bare_receipt()
    del receipt["cache"]["state"]
    with raises(DataError, "cache.state is missing"):
        receipt_fields.validate(receipt)
    with raises(DataError, "schema is None"):
        receipt_fields.validate([])


def test_layers_with_equal_backends_are_one_record() -> None:
    record = {name: value for name, value in NAMED.items() if name != "layers"}
    rows = [record | {"layer": layer} for layer in (3, 1, None, 2, 5)] + [record | {"layer": 4, "reason": "other"}]
    assert [(row["layers"], row["reason"]) for row in receipt_fields.by_span([*rows, *rows])] == [
        ("1-3, 5, mtp", "disabled"), ("4", "other")
    ]  # fmt: skip
    assert receipt_fields.layers("1-3, 5, mtp") == [1, 2, 3, 5, "mtp"]
    assert receipt_fields.by_span([record | {"op": "loss", "layer": None}])[0]["layers"] == "run"


def test_the_documented_fields_that_are_never_null_are_the_schema_s() -> None:
    page = (ROOT / "docs" / "receipts.md").read_text(encoding="utf-8").partition("## Fields\n")[2]
    never = {
        path
        for path, kind in re.findall(r"^\| `(.+?)` \| (.*?) \|", receipt_fields.table(), re.MULTILINE)
        if not kind.endswith(", or null")
    }
    assert set(re.findall(r"`([\w.]+)`", re.findall(r"All but (.*?) may be null", page, re.DOTALL)[0])) == never


GOOD: dict[str, Any] = {
    "data.kind": "real", "moe_enabled": True, "routing.forced_balance": False, "routing.dropped_tokens": 0,
    "routing.capacity_factor": None, "routing.expert_input": "jagged", "model.definition": {}, "indexer.top_k": 8,
    "indexer.loss_coefficient": 0.001, "indexer.warmup_steps": 0, "backends": [], "batch.rampup": False, "overlap": [],
    "parallelism.world_size": 2, "device": "NVIDIA H200",
}  # fmt: skip
REDUCED: dict[str, Any] = {"name": "gradient reduce", "asked": True, "possible": True, "reason": "it has a stream"}
ONE_BUCKET = REDUCED | {"possible": False, "reason": "one bucket holds all"}
EVEN, UNEVEN = [a_step(1, tokens=8), a_step(2, tokens=16)], [a_step(1, tokens=8), a_step(2, tokens=24)]


def judged(
    values: dict[str, Any], steps: Sequence[Step] = EVEN, compiled: dict[int, int] | None = None, overlap: str = ""
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the disqualifiers' evidence and the reasons of unjudged ones, for a run whose second step was measured."""
    seconds = {2: 1.0} if steps else {}
    faults, unjudged = compare.judge(compare.Case(values, steps, tokens_of(steps), seconds, compiled or {}, overlap))
    return {row["name"]: row["evidence"] for row in faults}, {row["name"]: row["reason"] for row in unjudged}


@pytest.mark.parametrize(
    ("given", "name", "evidence"),
    [
        ({"values": GOOD | {"data.kind": "mock"}}, "mock data", "mock data"),
        ({"values": GOOD | {"routing.forced_balance": True}}, "forced balance", "at random"),
        (
            {"values": GOOD | {"routing.dropped_tokens": 7, "routing.capacity_factor": 1.0}},
            "capacity drop", "7 assignments",
        ),
        ({"values": GOOD | {"indexer.loss_coefficient": 0.0}}, "indexer untrained", "coefficient is 0"),
        ({"values": GOOD | {"indexer.warmup_steps": 9}}, "indexer untrained", "first 9 steps"),
        (
            {"values": GOOD | {"backends": [NAMED]}},
            "fall-back", "op mla in layer 4 requested on kernel, runs on reference: disabled",
        ),
        (
            {"compiled": {2: SECOND // 2}},
            "warm-up inside the window", "1 measured steps compiled or tuned, step 2 for 0.500 s",
        ),
        ({"steps": [EVEN[0], a_step(2, tokens=16, loss=math.nan)]}, "NaN skipped", "1 steps were skipped or had a loss"),
        ({"steps": [EVEN[0], a_step(2, tokens=16, skipped=True)]}, "NaN skipped", "the first is step 2"),
        ({"values": GOOD | {"batch.rampup": True}}, "batch changed", "--rampup-batch-size"),
        ({"steps": UNEVEN}, "batch changed", "steps had 8, 16 tokens"),
        (
            {"values": GOOD | {"overlap": [ONE_BUCKET]}},
            "overlap hid nothing", "gradient reduce was requested to be hidden but cannot be: one bucket",
        ),
        (
            {"values": GOOD | {"overlap": [REDUCED], "profiler.hidden_share": 0.0}},
            "overlap hid nothing", "gradient reduce: requested to overlap, but the profile shows 0.0% of communication hidden",
        ),
        ({"overlap": "start_1, start_2 of rank 0"}, "overlapping starts", "start_1, start_2 of rank 0"),
    ],
)  # fmt: skip
def test_each_disqualifier_has_its_evidence(given: dict[str, Any], name: str, evidence: str) -> None:
    assert judged(GOOD) == ({}, {})
    disqualifiers, unjudged = judged(**{"values": GOOD} | given)
    assert (list(disqualifiers), unjudged) == ([name], {})
    assert evidence in disqualifiers[name]


@pytest.mark.parametrize(
    "change",
    [
        {"overlap": [REDUCED]},
        {"overlap": [REDUCED | {"asked": False}], "profiler.hidden_share": 0.0},
        {"overlap": [ONE_BUCKET], "profiler.hidden_share": 0.4},  # seen is better than derived
        {"overlap": [ONE_BUCKET], "parallelism.world_size": 1},  # nothing is communicated
        {"overlap": [ONE_BUCKET], "device": "CPU (any)"},
    ],
)
def test_overlap_that_hides_something_or_has_nothing_to_hide(change: dict[str, Any]) -> None:
    assert judged(GOOD | change) == ({}, {})


def test_what_cannot_be_judged() -> None:
    disqualifiers, unjudged = judged({}, [])
    assert (disqualifiers, list(unjudged)) == ({}, list(receipt_fields.DISQUALIFIERS[:-1]))
    unknown = REDUCED | {"possible": False, "reason": "the number of buckets is not known"}
    disqualifiers, unjudged = judged(GOOD | {"overlap": [unknown]})
    assert (disqualifiers, list(unjudged)) == ({}, ["overlap hid nothing"])
    assert "not known" in unjudged["overlap hid nothing"]
    lost = GOOD | {"routing.dropped_tokens": None, "routing.capacity_factor": 1.0}
    assert list(judged(lost)[1]) == ["capacity drop"]
