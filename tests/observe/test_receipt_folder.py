"""A receipt from a folder written by hand: two ranks, what a larger start left of a third; and from samples of a card."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.observe import events, receipts, routing
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import FINISHED, Log
from megacpp_mcore.observe.goodput import Recorder
from megacpp_mcore.observe.live import metrics_of
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.receipts import assemble as assembly
from megacpp_mcore.observe.receipts import facts as receipt_facts
from megacpp_mcore.observe.receipts.fields import RUNNING, flatten, why_unknown
from megacpp_mcore.util.card import REASONS, Samples
from tests.observe.recorded import (
    TOKENS,
    a_step,
    append,
    at,
    facts,
    file_of,
    receipt_writer,
    stepped,
    with_loss,
    write_profile,
    write_start,
)


@pytest.fixture(autouse=True)
def one_step_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exclude only the first step from the measured window."""
    monkeypatch.setattr(assembly, "WARM_UP_STEPS", 1)


def of_cache(files: int, added: int) -> dict[str, Any]:
    return {"cache.files": {"triton": files}, "cache.added": {"triton": added}}


def of_memory(peak: int, reserved: int) -> dict[str, Any]:
    peaks = {"memory.allocated_peak_bytes": peak, "memory.reserved_peak_bytes": reserved}
    return {"memory.kind": "CUDA allocator", **peaks}


def write_rank(
    run: Path, rank: int, peak: int, added: int, seconds: dict[int, float], lost_s: float = 0.0, how: str = FINISHED,
    number: int = 2, world_size: int = 2,
) -> None:  # fmt: skip
    """Write a rank's files of eight steps; ``seconds``: the steps longer than one second, ``lost_s``: evaluation after each."""
    steps = [stepped(number, step, seconds.get(step, 1.0), evaluation=lost_s, compile=1e-9) for step in range(1, 9)]
    if rank == world_size - 1:
        steps = [with_loss(step, 3.0 - step["step"] / 10) for step in steps]
    write_start(
        run, number, rank, *steps,
        facts(**of_memory(peak, peak + 50), **of_cache(3, added)),
        at(number, {}, how=how), began=number, world_size=world_size,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 2 and 3 were profiled; the third rank and the latest profile are from a failed start with three ranks."""
    for rank in range(3):
        write_rank(tmp_path, rank, 900, 0, dict.fromkeys(range(1, 9), 90.0), 9999.0, "ValueError", 1, 3)
    write_rank(tmp_path, 0, 100, 0, {})
    write_rank(tmp_path, 1, 300, 2, {2: 60.0, 3: 60.0, 4: 60.0, 6: 2.0, 7: 3.0, 8: 4.0}, 100.0)
    write_profile(tmp_path, 2, 3, phase="of rank 0")
    write_profile(tmp_path, 40, 41, rank=2, phase="of another rank")
    return tmp_path


def test_a_receipt_of_two_ranks_and_a_stale_third(run: Path) -> None:
    receipt = receipts.read(run)
    assert receipt["status"] == FINISHED
    assert receipt["ranks"] == {"expected": 2, "found": [0, 1]}
    memory = {"kind": "CUDA allocator", "allocated_peak_bytes": 300, "reserved_peak_bytes": 350, "ranks": [100, 300]}
    assert receipt["memory"] == memory
    assert receipt["cache"] == {"state": "cold", "files": {"triton": 6}, "added": {"triton": 2}}
    assert receipt["window"] == {"left_out": 1, "first_step": 5, "last_step": 8}
    times = {"rank": 1, "n": 4, "p50_s": 2.0, "p90_s": 4.0, "p99_s": 4.0, "max_s": 4.0}
    assert receipt["step_time"] == {name: pytest.approx(value, abs=1e-6) for name, value in times.items()}
    assert receipt["batch"]["effective_tokens"] == TOKENS
    rates = {name: receipt["throughput"][f"tokens_per_s{name}"] for name in ("", "_mean", "_per_device")}
    assert rates == pytest.approx({"": TOKENS / 2, "_mean": 4 * TOKENS / 10, "_per_device": TOKENS / 4}, rel=1e-6)
    assert (receipt["goodput"]["rank"], receipt["goodput"]["steps"], receipt["goodput"]["starts"]) == (0, 8, 2)
    assert receipt["profiler"]["phase"] == "of rank 0"
    assert (receipt["loss"]["first"], receipt["loss"]["last"]) == (2.9, 2.2)


@pytest.mark.parametrize(
    ("hows", "status"),
    [
        ((FINISHED, None), RUNNING),
        ((None, FINISHED), RUNNING),
        ((FINISHED, "MemoryError"), "MemoryError"),
        ((None, "MemoryError"), "MemoryError"),
        ((FINISHED,), RUNNING),
        ((FINISHED, FINISHED), FINISHED),
    ],
)
def test_the_status_is_that_of_all_ranks(tmp_path: Path, hows: tuple[str | None, ...], status: str) -> None:
    for rank, how in enumerate(hows):
        write_start(tmp_path, 1, rank, facts(), at(1, {}, **({} if how is None else {"how": how})), world_size=2)
    receipt = receipts.read(tmp_path)
    assert (receipt["status"], receipt["ranks"]) == (status, {"expected": 2, "found": list(range(len(hows)))})


def test_caches_that_had_everything_are_warm_and_unused_ones_are_not(run: Path) -> None:
    write_rank(run, 1, 300, 0, {})
    assert receipts.read(run)["cache"]["state"] == "warm"
    for rank in (0, 1):
        lines = facts(**of_cache(3, 9)), stepped(9, 1), at(0, {}, how=FINISHED)
        write_start(run, 2, rank, *lines, began=8, world_size=2)
    assert receipts.read(run)["cache"]["state"] == "unused"  # what came meanwhile is another process's


def test_a_start_that_has_measured_nothing_has_no_step_times(run: Path) -> None:
    """The facts are already its own: what the start before it measured may have been with other backends."""
    for rank in (0, 1):
        write_start(run, 3, rank, facts(), stepped(9, 9, resumed_at=8), began=8, world_size=2)
    receipt = receipts.read(run)
    assert receipt["step_time"]["n"] is None
    assert receipt["throughput"]["tokens_per_s"] is None
    reason = "the last start has no step after its first 1 that was not profiled"
    assert why_unknown("step_time.n", receipt["unknown"]) == reason
    assert why_unknown("throughput.tokens_per_s", receipt["unknown"]) == reason


@pytest.mark.parametrize(("how", "model"), [("SystemExit", False), (FINISHED, True), (None, False), (None, True)])
def test_starts_that_came_to_no_step_leave_the_receipt_of_the_one_before(run: Path, how: str | None, model: bool) -> None:
    """A mistyped option; a run that was started again at its last step; and one that was killed, or has only just begun."""
    before = receipts.read(run)
    for number, rank in ((3, 0), (3, 1), (4, 0), (4, 1)):
        ended = at(number * 10 + 1, {"startup": 1}, **({} if how is None else {"how": how}))
        write_start(run, number, rank, *([facts()] if model else []), ended, began=number * 10, world_size=2)
    receipt = receipts.read(run)
    (note,) = (note for note in receipt["notes"] if note not in before["notes"])
    became = f"ended before its first step: {how}" if how else "has not reached its first step, or was killed before it"
    assert note == f"a start at 1970-01-01T00:00:40+00:00 {became} (the last of 2)"
    assert receipt["status"] == (RUNNING if how is None else FINISHED)
    anew = dict.fromkeys(("written_at", "notes", "goodput", "status"))
    assert receipt | anew == before | anew
    assert (before["step_time"]["n"], receipt["goodput"]["starts"]) == (4, 4)


def test_of_starts_that_all_did_no_step_it_is_the_last(tmp_path: Path) -> None:
    """One runs out of memory in its first step, so that it is tried with a smaller batch."""
    for number, batch in ((1, {"batch.global_batch_size": 8}), (2, {"batch.global_batch_size": 4})):
        line = facts(**batch)
        write_start(tmp_path, number, 0, line, at(number, {}, how="MemoryError"), began=number)
    receipt = receipts.read(tmp_path)
    assert (receipt["status"], receipt["batch"]["global_batch_size"], receipt["notes"]) == ("MemoryError", 4, [])


def test_the_lost_branch_is_no_part_of_the_run(tmp_path: Path) -> None:
    """Ten steps with a NaN loss in the eighth; the run then resumed from the fifth, to the seventh."""
    lost = [with_loss(stepped(step, step), float("nan") if step == 8 else 2.0) for step in range(1, 11)]
    write_start(tmp_path, 1, 0, facts(), *(line | {"metrics": {"step": line["step"], "of": 1}} for line in lost))
    again = [with_loss(stepped(20, 6, resumed_at=5), 1.5), with_loss(stepped(21, 7, resumed_at=5), 1.25)]
    again = [line | {"metrics": {"step": line["step"], "of": 2}} for line in again]
    write_start(tmp_path, 2, 0, facts(), *again, began=19)
    shown = [(metrics["step"], metrics["of"]) for metrics in metrics_of(events.read(tmp_path))]
    assert shown == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2), (7, 2)]
    receipt = receipts.read(tmp_path)
    assert (receipt["loss"]["last_step"], receipt["loss"]["last"]) == (7, 1.25)
    assert "NaN skipped" not in {disqualifier["name"] for disqualifier in receipt["disqualifiers"]}


def test_starts_that_overlap_disqualify_the_receipt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "overlapping starts" not in {disqualifier["name"] for disqualifier in receipts.read(run)["disqualifiers"]}
    write_start(run, 3, 1, at(9), began=2.5, world_size=2)
    write_start(run, 5, 1, at(6, how="CheckpointError"), began=5, world_size=2)  # refused: another run trains there
    assert "overlapping starts" not in {disqualifier["name"] for disqualifier in receipts.read(run)["disqualifiers"]}
    write_start(run, 4, 1, at(5), began=4, world_size=2)
    (overlap,) = (row["evidence"] for row in receipts.read(run)["disqualifiers"] if row["name"] == "overlapping starts")
    assert overlap.startswith("start_3, start_4 of rank 1 were recorded at the same time")
    assert cli.main(["report", "goodput", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == overlap


COUNTED: dict[str, Any] = {"layers": {"2": routing.Load((3, 5), 8).record()}, "failed": None}
OF_ROUTING = ("routing.layers", "routing.entropy", "routing.max_over_mean", "routing.dropped_tokens")


FAILED = "counting failed on a rank: OSError: x"
MISSING = "the counts of rank 1 are missing, so the sums would be incomplete"


@pytest.mark.parametrize(
    ("fate", "second", "reason"),
    [
        ("", COUNTED, None),
        ("", {"layers": {}, "failed": FAILED}, FAILED),
        ("", {}, MISSING),
        ("missing", COUNTED, MISSING),
    ],
)
def test_what_some_ranks_counted_does_not_pass_for_all_ranks(
    tmp_path: Path, fate: str, second: dict[str, Any], reason: str | None
) -> None:
    for rank, record in enumerate((COUNTED, second)):
        line = facts(moe_enabled=True, **({"routing": record} if record else {}))
        write_start(tmp_path, 1, rank, line, at(1, {}, how=FINISHED), world_size=2)
    if fate == "missing":
        file_of(tmp_path, 1, 1).unlink()
    receipt = receipts.read(tmp_path)
    assert {why_unknown(path, receipt["unknown"]) for path in OF_ROUTING} == {reason}
    assert [flatten(receipt)[path] is None for path in OF_ROUTING] == [reason is not None] * len(OF_ROUTING)
    if reason is None:
        assert receipt["routing"]["layers"]["2"]["asked"] == 16


class Training:
    """A start that has built its model; ``peak`` is its global batch size and its peak memory."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, peak: int = 5, every_s: float = 30) -> None:
        def of_model(recorded: receipt_facts.Facts, *_: Any) -> None:
            recorded.put("moe_enabled", False)
            recorded.put("batch.global_batch_size", peak)

        monkeypatch.setattr(receipt_facts, "of_model", of_model)
        monkeypatch.setattr(receipt_facts, "memory", lambda _: of_memory(peak, peak))
        self.log = Log(run, 0, 1, Clock(), heartbeat_s=60)
        self.log.clock.become(Phase.IDLE)
        self.recorder = Recorder(self.log, with_losses=True)
        self.writer = receipt_writer(self.log, every_s=every_s)
        without_modules = SimpleNamespace(config=SimpleNamespace(num_moe_experts=None), modules=list)
        self.writer.on_model([without_modules], None)

    def step(self, number: int) -> None:
        step = a_step(number)
        self.recorder.on_step(step)
        self.writer.on_step(step)

    def end(self, error: BaseException | None = None) -> None:
        self.recorder.on_end(error)
        self.writer.on_end(error)
        self.log.close()


def test_a_start_is_written_as_it_goes_and_its_receipt_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its facts are written with its first step, in case the process is killed."""
    training = Training(tmp_path, monkeypatch)
    assert (receipts.read(tmp_path)["status"], receipts.read(tmp_path)["memory"]["kind"]) == (RUNNING, None)
    training.step(1)
    receipt = receipts.read(tmp_path)
    assert (receipt["memory"]["allocated_peak_bytes"], receipt["batch"]["global_batch_size"]) == (5, 5)
    assert "killed" in receipt["unknown"]["cache"]
    assert not (tmp_path / "receipt.json").exists()
    lines = training.log.path.read_text().count("\n")
    training.step(2)
    assert training.log.path.read_text().count("\n") == lines + 1  # not every step
    training.end()
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["status"], receipt["loss"]["last_step"], receipt["cache"]["state"]) == (FINISHED, 2, "unused")
    again = Training(tmp_path, monkeypatch, 9)
    again.step(3)
    again.end(MemoryError())
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert (receipt["status"], receipt["batch"]["global_batch_size"]) == ("MemoryError", 9)


def test_what_is_compiled_before_there_is_a_model_makes_the_caches_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    graphs = tmp_path / "TORCHINDUCTOR_CACHE_DIR" / "fxgraph" / "ab"
    (graphs / "abcd").mkdir(parents=True)
    training = Training(tmp_path / "run", monkeypatch)
    (tmp_path / "TRITON_CACHE_DIR" / "KERNEL").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))  # as PyTorch does where it is not set
    training.log.write(phases={"compile": 1})
    (graphs / "abce").mkdir()
    training.end()
    cache = receipts.read(tmp_path / "run")["cache"]
    assert cache == {"state": "cold", "files": {"triton": 0, "inductor": 1}, "added": {"triton": 1, "inductor": 1}}


def test_a_failure_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch)
    training.writer.on_failure("Live failed in step 3")
    assert receipts.read(tmp_path)["notes"] == ["rank 0: Live failed in step 3"]


def test_memory_that_cannot_be_read_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch)
    training.step(1)
    error = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(receipt_facts, "memory", mock.Mock(side_effect=error))
    training.end(ArithmeticError())
    receipt = receipts.read(tmp_path)
    assert (receipt["status"], receipt["memory"]["allocated_peak_bytes"]) == ("ArithmeticError", 5)
    (note,) = receipt["notes"]
    assert "memory peaks are from an earlier reading: RuntimeError('CUDA error: an illegal" in note


def test_the_last_lines_of_other_ranks_are_waited_for_and_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts.writer, "PATIENCE_S", 0.2)
    other = write_start(tmp_path, 1, 1, facts(), at(1, {}))
    assert not receipts.writer._has_ended(other)
    receipts.writer._await([other, file_of(tmp_path, 1, 2)])
    append(other, at(2, {}, how=FINISHED))
    assert not receipts.writer._has_ended(other)
    append(other, at(2, recorded=True), at(3))
    assert receipts.writer._has_ended(other)


def data_facts(**arguments: Any) -> dict[str, Any]:
    """Return the data facts that follow from a run's arguments."""
    args = SimpleNamespace(fim_data=False, mock_data=False, split=None, **arguments)
    facts = receipt_facts.Facts()
    with mock.patch.object(Loop, "arguments", return_value=args):
        receipt_facts._data(facts, args, Loop().data_words())
    return facts.values


def test_the_checksum_is_of_what_files_of_blends_and_splits_list(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"document {name}\n" * 20)
        prepare([str(tmp_path / f"{name}.txt")], str(tmp_path / name))
    one, two, listed = (str(tmp_path / name) for name in ("one", "two", "list"))
    blend = ["0.25", one, "0.75", two]
    Path(listed).write_text(" ".join(blend))
    plain = data_facts(data_path=blend)
    assert data_facts(data_args_path=listed) == plain
    assert [(part["name"], part["weight"]) for part in plain["data.datasets"]] == [("one", 0.25), ("two", 0.75)]
    Path(listed).write_text(f"0.5 {one} 0.5 {two}")
    assert data_facts(data_args_path=listed)["data.checksum"] != plain["data.checksum"]

    splits = {"train": ["3", one], "valid": [one], "test": None}
    Path(listed).write_text(json.dumps(splits))
    by_file = data_facts(per_split_data_args_path=listed)
    assert by_file == data_facts(train_data_path=["3", one], valid_data_path=[one])
    assert [part["weight"] for part in by_file["data.datasets"]] == [3.0, None]
    Path(listed).write_text(json.dumps(splits | {"train": [one], "valid": ["3", one]}))
    assert data_facts(per_split_data_args_path=listed)["data.checksum"] != by_file["data.checksum"]


def test_medians_and_how_often_the_clock_was_held_down() -> None:
    samples = Samples()
    samples.take()
    assert samples.record() == {}
    readings = iter([(1980, 300.0, 0), (1500, 690.0, 0b100), (1600, 700.0, 0b1000100)])
    samples.read = lambda: next(readings)
    for _ in range(4):  # the last one fails
        samples.take()
    assert samples.read is None
    assert samples.record() == {
        "card.sm_clock_mhz": 1600,
        "card.power_w": 690.0,
        "card.throttled": {REASONS[2]: 2 / 3, REASONS[6]: 1 / 3},
    }


def test_the_window_is_sampled_at_heartbeats_and_the_slowest_card_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path, 0, 1, Clock(), heartbeat_s=3600)
    writer = receipt_writer(log, every_s=0.0)
    writer._samples.read = lambda: (1500, 690.0, 0)
    log.on_beat()
    assert writer._samples.record() == {}  # no step has been done
    for number in range(1, 4):
        writer.on_step(a_step(number))
    log.on_beat()
    writer.on_step(a_step(4))
    writer.on_end(None)
    log.close()
    assert receipts.read(tmp_path)["card"]["sm_clock_mhz"] == 1500
    for rank in range(2):
        card = {"card.matmul_tflops_per_s": 700.0 + rank, "card.sm_clock_mhz": 1500 - rank, "card.power_w": 600 + rank}
        lines = at(0, facts={"environment": {}, "ddp.bucket_elements": [5 + rank], **card}), stepped(3 + rank, 1)
        write_start(tmp_path / "two", 1, rank, *lines, world_size=2, began=1)
    receipt = receipts.read(tmp_path / "two")
    assert (receipt["card"]["matmul_tflops_per_s"], receipt["card"]["sm_clock_mhz"], receipt["card"]["power_w"]) == (
        700,
        1499,
        600,
    )
    assert (receipt["time_to_first_step_s"], receipt["ddp"]["bucket_elements"]) == (3.0, [5])
