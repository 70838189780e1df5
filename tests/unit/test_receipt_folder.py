"""A receipt from a folder that was written by hand: two ranks, and what a larger start before left of a third."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, receipts, routing
from megacpp_mcore.observe.listener import Listener
from megacpp_mcore.observe.receipts import assembly as receipt_assembly
from megacpp_mcore.observe.receipts import facts as receipt_facts
from megacpp_mcore.observe.receipts import modules as receipt_modules
from megacpp_mcore.observe.receipts.schema import FINISHED, RUNNING, SCHEMA, flatten, why_unknown
from megacpp_mcore.observe.steps import Step
from tests.unit.test_receipts import lines, spent

TOKENS = 1024
"""Of a step."""


def write_part(run: Path, rank: int, status: str = FINISHED, moe_enabled: bool = False, **more: Any) -> None:
    """The part of one of two ranks; ``more`` as the writer names it."""
    facts = {"parallelism.world_size": 2, "moe_enabled": moe_enabled, "environment": {}}
    part = {
        "schema": SCHEMA,
        "rank": rank,
        "status": status,
        "warm_up_steps": 1,
        "notes": [],
        "run": facts,
        "unknown": {},
    }
    path = receipts.part_file(run, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(part | more))


def write_rank(
    run: Path, rank: int, status: str, peak: int, added: int, seconds: dict[int, float], lost_s: float = 0.0
) -> None:
    """All that a rank leaves of eight steps; ``seconds`` of those that took longer than one, ``lost_s`` after each."""
    write_part(
        run,
        rank,
        status,
        memory={"kind": "CUDA allocator", "allocated_peak_bytes": peak, "reserved_peak_bytes": peak + 50},
        cache={"files": {"triton": 3}, "added": {"triton": added}},
    )
    lines(
        goodput.rank_file(run, rank),
        {"began": 0},
        *(spent(seconds.get(number, 1.0), number, evaluation=lost_s) for number in range(1, 9)),
        {"at": 0, "phases": {}, "how": goodput.FINISHED},
    )


def write_steps(run: Path, *steps: tuple[int, int, float]) -> None:
    """The numbers of steps, from which they were resumed, and their losses."""
    lines(
        run / "steps.jsonl",
        *(
            {
                "step": number, "resumed_at": resumed_at, "time_s": 0.0, "tokens": number * TOKENS,
                "losses": {"lm loss": loss}, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": False,
            }
            for number, resumed_at, loss in steps
        ),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 2 and 3 were profiled; the third rank, with the latest profile, is of a start with three, which an error ended."""
    write_rank(tmp_path, 0, FINISHED, 100, 0, {})
    write_rank(tmp_path, 1, FINISHED, 300, 2, {2: 60.0, 3: 60.0, 4: 60.0, 6: 2.0, 7: 3.0, 8: 4.0}, 100.0)
    write_rank(tmp_path, 2, "ValueError", 900, 0, dict.fromkeys(range(1, 9), 90.0), 9999.0)
    write_steps(tmp_path, *((number, 0, 3.0 - number / 10) for number in range(1, 9)))
    write_profile(tmp_path, 0, 2, 3, "of a rank that is there")
    write_profile(tmp_path, 2, 40, 41, "of one that is not")
    return tmp_path


def write_profile(run: Path, rank: int, first: int, last: int, trigger: str) -> None:
    """The table of a profile that one rank left."""
    table = {
        "steps": [first, last],
        "phase": "steady",
        "rank": rank,
        "families": {},
        "dominant": None,
        "trigger": trigger,
    }
    path = run / "profile" / f"{first}-{last}" / f"rank_{rank:05d}" / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table))


def test_a_receipt_of_two_ranks_and_a_stale_third(run: Path) -> None:
    found = receipts.read(run)
    assert found["status"] == FINISHED
    assert found["ranks"] == {"expected": 2, "found": [0, 1]}
    memory = {"kind": "CUDA allocator", "allocated_peak_bytes": 300, "reserved_peak_bytes": 350, "ranks": [100, 300]}
    assert found["memory"] == memory
    assert found["cache"] == {"state": "cold", "files": {"triton": 6}, "added": {"triton": 2}}
    assert found["window"] == {"left_out": 1, "first_step": 5, "last_step": 8}
    times = {"rank": 1, "n": 4, "p50_s": 2.0, "p90_s": 4.0, "p99_s": 4.0, "max_s": 4.0}
    assert found["step_time"] == times
    assert found["batch"]["effective_tokens"] == TOKENS
    rates = {name: found["throughput"][f"tokens_per_s{name}"] for name in ("", "_mean", "_per_device")}
    assert rates == {"": TOKENS / 2, "_mean": 4 * TOKENS / 10, "_per_device": TOKENS / 4}
    assert (found["goodput"]["rank"], found["goodput"]["steps"]) == (1, 8)
    assert found["profiler"]["trigger"] == "of a rank that is there"
    assert (found["loss"]["first"], found["loss"]["last"]) == (2.9, 2.2)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (FINISHED, RUNNING, RUNNING),
        (RUNNING, FINISHED, RUNNING),
        (FINISHED, "MemoryError", "MemoryError"),
        (RUNNING, "MemoryError", "MemoryError"),
    ],
)
def test_the_status_is_that_of_all_ranks(run: Path, first: str, second: str, status: str) -> None:
    for rank, state in enumerate((first, second)):
        write_part(run, rank, state)
    assert receipts.read(run)["status"] == status


def test_a_run_is_running_while_a_rank_is_missing(run: Path) -> None:
    receipts.part_file(run, 1).unlink()
    found = receipts.read(run)
    assert (found["status"], found["ranks"]) == (RUNNING, {"expected": 2, "found": [0]})


def test_caches_that_had_everything_are_warm_and_unused_ones_are_not(run: Path) -> None:
    write_rank(run, 1, FINISHED, 300, 0, {})
    assert receipts.read(run)["cache"]["state"] == "unused"
    lines(goodput.rank_file(run, 1), {"began": 0}, spent(1.0, 1, compile=0.5))
    assert receipts.read(run)["cache"]["state"] == "warm"


def test_a_start_that_has_measured_nothing_has_no_step_times(run: Path) -> None:
    """The facts are already its own: what the start before it measured may have been with other backends."""
    for rank in (0, 1):
        with goodput.rank_file(run, rank).open("a") as stream:
            stream.write("".join(json.dumps(one) + "\n" for one in ({"began": 0}, spent(1.0, 9, resumed_at=8))))
    found = receipts.read(run)
    assert found["step_time"]["n"] is None
    assert found["throughput"]["tokens_per_s"] is None
    reason = "the last start has no step after its first 1 that was not profiled"
    assert why_unknown("step_time.n", found["unknown"]) == reason
    assert why_unknown("throughput.tokens_per_s", found["unknown"]) == reason


ENDED = {"at": 0, "phases": {}, "how": "SystemExit"}
WITHOUT_STEP = {"began": "2026-01-31T12:00:00+00:00", "how": "SystemExit", "number": 1}


def append(run: Path, rank: int, *records: dict[str, Any]) -> None:
    """What a further start adds to a rank's goodput."""
    with goodput.rank_file(run, rank).open("a") as stream:
        stream.write("".join(json.dumps(one) + "\n" for one in records))


def test_what_ended_before_its_first_step_leaves_the_times_of_the_start_before(run: Path) -> None:
    before = receipts.read(run)
    for rank in (0, 1):
        append(run, rank, {"began": 0}, {"at": 0, "phases": {"startup": 5}}, ENDED, {"began": 0}, ENDED)
        path = receipts.part_file(run, rank)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"without_step": WITHOUT_STEP | {"number": 2}}))
    found = receipts.read(run)
    assert found["notes"] == [
        "a start at 2026-01-31T12:00:00+00:00 ended before its first step: SystemExit (the last of 2)"
    ]
    again = ("written_at", "notes", "goodput")
    assert {**found, **dict.fromkeys(again)} == {**before, **dict.fromkeys(again)}
    assert (before["step_time"]["n"], found["goodput"]["starts"]) == (4, 3)


def running(run: Path, rank: int, without_step: bool = False) -> None:
    """Let a start begin on a rank, which keeps what the one before it left; or end there without a step."""
    path = receipts.part_file(run, rank)
    before = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            before
            | ({"without_step": WITHOUT_STEP} if without_step else {"status": RUNNING, "steps": 0, "before": before})
        )
    )
    append(run, rank, {"began": 0}, *([ENDED] if without_step else []))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_ended_without_a_step_on_one_rank_has_on_the_others_that_were_killed(run: Path, rank: int) -> None:
    """As torchrun kills them, which then say nothing; a start that goes on says of itself what is known."""
    before = receipts.read(run)
    running(run, rank)
    running(run, 1 - rank, without_step=True)
    found = receipts.read(run)
    assert (found["status"], found["step_time"]) == (before["status"], before["step_time"])
    assert found["notes"] == ["a start at 2026-01-31T12:00:00+00:00 ended before its first step: SystemExit"]


def test_a_start_that_may_still_do_a_step_has_no_times_of_the_one_before(run: Path) -> None:
    for rank in (0, 1):
        running(run, rank)
    found = receipts.read(run)
    assert found["status"] == RUNNING
    assert why_unknown("step_time.n", found["unknown"]) == "the last start has done no step"


def test_the_parts_of_a_start_without_a_step_have_no_times_of_another(run: Path) -> None:
    """The part of the start before could not be kept, and these facts are not its."""
    for rank in (0, 1):
        append(run, rank, {"began": 0}, ENDED)
    found = receipts.read(run)
    assert why_unknown("step_time.n", found["unknown"]) == "the last start has done no step"


def test_the_lost_branch_is_no_part_of_the_run(run: Path) -> None:
    """Ten steps with a loss that is no number in the eighth; the run went on from the fifth, to the seventh."""
    lost = [(number, 0, float("nan") if number == 8 else 2.0) for number in range(1, 11)]
    write_steps(run, *lost, (6, 5, 1.5), (7, 5, 1.25))
    found = receipts.read(run)
    assert (found["loss"]["last_step"], found["loss"]["last"]) == (7, 1.25)
    assert "NaN skipped" not in {one["name"] for one in found["disqualifiers"]}
    assert [step.step for step in receipt_assembly._steps(run, {})] == list(range(1, 8))


def test_layers_that_were_not_counted_are_unknown(run: Path) -> None:
    load = routing.Load((3, 5), 8).record()
    record = {"layers": {"2": load, "4": load}, "router_dtypes": {"2": "float32"}, "index_overlap": {}}
    wired = {"dispatchers": [], "shared_expert_overlap": [False], "top_k": [1]}
    write_part(run, 0, moe_enabled=True, moe=wired, routing=record)
    write_part(run, 1, moe_enabled=True, moe=wired, routing=record | {"not_counted": {"2": routing.CAPTURED}})
    found = receipts.read(run)
    assert list(found["routing"]["layers"]) == ["4"]
    for name in ("entropy", "max_over_mean", "dropped_tokens"):
        assert found["routing"][name] is None
        assert why_unknown(f"routing.{name}", found["unknown"]) == f"layer 2: {routing.CAPTURED}"
    assert found["routing"]["router_dtypes"] == ["float32"]


def test_of_counts_that_failed_on_one_rank_nothing_is_told(run: Path) -> None:
    """Nor of the other's, which would pass for all ranks'."""
    record = {"layers": {"2": routing.Load((3, 5), 8).record()}, "router_dtypes": {"2": "float32"}}
    record |= {"index_overlap": {"1-5": 0.5}, "failed": None}
    wired = {"dispatchers": [], "shared_expert_overlap": [False], "top_k": [1]}
    write_part(run, 0, moe_enabled=True, moe=wired, routing=record)
    failed = record | {"layers": {}, "index_overlap": {}, "failed": "counting failed in step 4 on a rank: OSError: x"}
    write_part(run, 1, moe_enabled=True, moe=wired, routing=failed)
    found = receipts.read(run)
    for path in ("routing.layers", "routing.entropy", "routing.dropped_tokens", "indexer.overlap"):
        assert flatten(found)[0][path] is None
        assert why_unknown(path, found["unknown"]) == failed["failed"]
    assert found["routing"]["top_k"] == 1


WIRED = {"dispatchers": [], "shared_expert_overlap": [False], "top_k": [1]}
COUNTED = {
    "layers": {"2": routing.Load((3, 5), 8).record()},
    "router_dtypes": {"2": "float32"},
    "index_overlap": {"1-5": 0.5},
}
OF_ROUTING = ("routing.layers", "routing.entropy", "routing.max_over_mean", "routing.dropped_tokens",
              "routing.router_dtypes", "indexer.overlap")  # fmt: skip


def check_routing_unknown(run: Path, reason: str) -> None:
    found = receipts.read(run)
    for path in OF_ROUTING:
        assert flatten(found)[0][path] is None, path
        assert why_unknown(path, found["unknown"]) == reason, path


@pytest.mark.parametrize("fate", ["missing", "damaged", "without counts"])
def test_of_counts_that_are_missing_on_one_rank_nothing_is_told(run: Path, fate: str) -> None:
    for rank in (0, 1):
        write_part(run, rank, moe_enabled=True, moe=WIRED, routing=COUNTED)
    whole = receipts.read(run)
    assert (whole["routing"]["layers"]["2"]["asked"], whole["indexer"]["overlap"]) == (16, {"1-5": 0.5})
    if fate == "missing":
        receipts.part_file(run, 1).unlink()
    elif fate == "damaged":
        receipts.part_file(run, 1).write_text("{")
    else:
        write_part(run, 1, moe_enabled=True, moe=WIRED)
    check_routing_unknown(run, "the counts of rank 1 are missing, and those of the others are not the whole")


def test_an_error_before_the_first_reading_is_why_nothing_was_counted(run: Path) -> None:
    unread = COUNTED | {"layers": {}, "index_overlap": {}}
    write_part(run, 0, "MemoryError", moe_enabled=True, moe=WIRED, routing=unread)
    write_part(run, 1, RUNNING, moe_enabled=True, moe=WIRED, routing=unread)
    check_routing_unknown(run, "an error ended the run before the first reading: MemoryError")


def test_a_damaged_file_of_steps_is_named_wherever_it_is_missed(run: Path) -> None:
    (run / "steps.jsonl").write_text('{"step": 1}\n')
    found = receipts.read(run)
    reason = found["unknown"]["loss"]
    assert "steps.jsonl, line 1: not the record of a step" in reason
    for path in ("batch.effective_tokens", "throughput.tokens_per_s", "throughput.tokens_per_s_mean"):
        assert why_unknown(path, found["unknown"]) == reason
    unjudged = {one["name"]: one["reason"] for one in found["unjudged"]}
    assert unjudged["NaN skipped"] == reason


# --- No part ----------------------------------------------------------------------------------------------------------


def test_where_no_part_can_be_read_the_written_receipt_is(run: Path) -> None:
    written = receipts.write(run).read_text()
    for rank in (0, 1, 2):
        receipts.part_file(run, rank).write_text("{\n")
    found = receipts.read(run)
    (note,) = found["notes"]
    assert note.startswith("this is receipt.json as it was written last, for none can be assembled from the parts: ")
    assert "no JSON, damaged or cut off" in note
    assert found | {"notes": []} == json.loads(written)
    (run / "receipt.json").write_text(written[:100])
    with pytest.raises(
        DataError, match=r"rank_0000\d\.json, line 2: no JSON, damaged or cut off; expected the part of"
    ):
        receipts.read(run)


def test_a_run_that_was_killed_before_its_first_part_is_said_to_be_one(run: Path) -> None:
    for rank in (0, 1, 2):
        receipts.part_file(run, rank).unlink()
    (run / "parts" / ".rank_00000.json.77").write_text("{")
    said = rf"the run was killed before it told anything of itself, or has only just begun; `report goodput {run}`"
    with pytest.raises(DataError, match=said):
        receipts.read(run)
    (run / "parts" / ".rank_00000.json.77").unlink()
    (run / "parts").rmdir()
    with pytest.raises(DataError, match=said):
        receipts.read(run)


@pytest.mark.parametrize(("content", "line"), [(b"", 1), (b'{"schema": 1,\n "fam', 2), (b"\xff\xfe", 0)])
def test_a_receipt_that_is_cut_off_is_said_to_be_one(tmp_path: Path, content: bytes, line: int) -> None:
    file = tmp_path / "receipt.json"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        receipts.read(file)
    where = f"{file}, line {line}" if line else str(file)
    assert str(raised.value) == (
        f"{where}: no JSON, damaged or cut off; expected a receipt, or the folder of a run that was observed: name the "
        "folder of its run, from whose parts it is assembled again"
    )


# --- The writer -------------------------------------------------------------------------------------------------------


def test_what_is_compiled_before_there_is_a_model_makes_the_caches_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        (tmp_path / variable).mkdir()
    writer = receipts.ReceiptWriter(tmp_path / "run", 0)
    (tmp_path / "TRITON_CACHE_DIR" / "kernel").write_text("of the warm-up")
    writer.on_end(None)
    found = receipts.read(tmp_path / "run")["cache"]
    assert (found["state"], found["added"]) == ("cold", {"triton": 1, "inductor": 0})


def test_a_restart_is_running_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    receipts.ReceiptWriter(tmp_path, 0).on_end(None)
    before = receipts.read(tmp_path)
    assert before["status"] == FINISHED
    monkeypatch.delenv("NCCL_ALGO")
    writer = receipts.ReceiptWriter(tmp_path, 0, notes=["the second start"])
    killed = receipts.read(tmp_path)
    assert killed["status"] == RUNNING
    assert killed["environment"]["NCCL_ALGO"] == "Ring"
    assert killed["versions"] == before["versions"]
    assert killed["notes"] == ["the second start"]
    assert why_unknown("cache.state", killed["unknown"]) is not None
    writer.on_end(None)
    assert "NCCL_ALGO" not in receipts.read(tmp_path)["environment"]


def test_a_damaged_part_of_an_earlier_start_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = receipts.part_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text("{")
    receipts.ReceiptWriter(tmp_path, 0)
    assert "is not kept" in caplog.text
    assert receipts.read(tmp_path)["status"] == RUNNING


class Core:
    """A model chunk without a parameter."""

    config = SimpleNamespace(num_moe_experts=None)

    def modules(self) -> list[Any]:
        """None."""
        return []


def begin(run: Path, monkeypatch: pytest.MonkeyPatch, peak: int = 5, **more: Any) -> receipts.ReceiptWriter:
    """A start that has come to a model, with a global batch of ``peak``, which is also its peak of memory."""

    def of_model(facts: receipt_facts.Facts, *_: Any) -> None:
        facts.put("moe_enabled", False)
        facts.put("batch.global_batch_size", peak)

    said = {"kind": "CUDA allocator", "allocated_peak_bytes": peak, "reserved_peak_bytes": peak}
    monkeypatch.setattr(receipt_facts, "of_model", of_model)
    monkeypatch.setattr(receipt_modules, "memory", lambda _: said)
    writer = receipts.ReceiptWriter(run, 0, **more)
    writer.on_model([Core()], None)
    return writer


def done(number: int) -> Step:
    return Step(number, 0, 0.0, number * TOKENS, {"lm loss": 2.0}, 1.0, 1e-3, False)


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("how", [None, SystemExit(2)])
def test_a_start_without_a_step_leaves_what_the_run_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException | None, model: bool
) -> None:
    """A mistyped option, and a run that was started again at its last step."""
    writer = begin(tmp_path, monkeypatch)
    writer.on_step(done(1))
    writer.on_end(None)
    before = json.loads(receipts.part_file(tmp_path, 0).read_text())
    name = FINISHED if how is None else "SystemExit"
    for number in (1, 2, 3):
        again = begin(tmp_path, monkeypatch, 9) if model else receipts.ReceiptWriter(tmp_path, 0)
        assert receipts.read(tmp_path)["status"] == RUNNING
        again.on_end(how)
        part = json.loads(receipts.part_file(tmp_path, 0).read_text())
        said = part.pop("without_step")
        assert part == before
        assert (said["how"], said["number"]) == (name, number)
    found = json.loads((tmp_path / "receipt.json").read_text())
    assert (found["status"], found["batch"]["global_batch_size"]) == (FINISHED, 5)
    assert found["notes"] == [f"a start at {said['began']} ended before its first step: {name} (the last of 3)"]

    trained = begin(tmp_path, monkeypatch, 9)
    trained.on_step(done(2))
    trained.on_end(how)
    found = receipts.read(tmp_path)
    assert (found["status"], found["batch"]["global_batch_size"], found["notes"]) == (name, 9, [])


@pytest.mark.parametrize("model", [False, True])
def test_a_start_that_was_killed_before_its_first_step_takes_nothing_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: bool
) -> None:
    """With a model or without one; the next ends without a step, too."""
    writer = begin(tmp_path, monkeypatch)
    writer.on_step(done(1))
    writer.on_end(None)
    before = json.loads(receipts.part_file(tmp_path, 0).read_text())
    for _ in range(2):  # killed
        begin(tmp_path, monkeypatch, 9) if model else receipts.ReceiptWriter(tmp_path, 0)
    assert receipts.read(tmp_path)["status"] == RUNNING
    for again in (receipts.ReceiptWriter(tmp_path, 0), begin(tmp_path, monkeypatch, 9)):
        again.on_end(SystemExit(2))
        part = json.loads(receipts.part_file(tmp_path, 0).read_text())
        assert part.pop("without_step")["how"] == "SystemExit"
        assert part == before
    trained = begin(tmp_path, monkeypatch, 9)
    assert json.loads(receipts.part_file(tmp_path, 0).read_text())["before"]["steps"] == 1
    trained.on_step(done(2))
    assert "before" not in json.loads(receipts.part_file(tmp_path, 0).read_text())


def test_of_starts_that_all_did_no_step_the_last_with_a_model_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One runs out of memory in its first step, so that it is tried with a smaller batch, and then mistyped."""
    for size in (8, 4):
        begin(tmp_path, monkeypatch, size).on_end(MemoryError())
    found = receipts.read(tmp_path)
    assert (found["status"], found["batch"]["global_batch_size"], found["notes"]) == ("MemoryError", 4, [])
    receipts.ReceiptWriter(tmp_path, 0).on_end(SystemExit(2))
    found = receipts.read(tmp_path)
    assert (found["status"], found["batch"]["global_batch_size"], len(found["notes"])) == ("MemoryError", 4, 1)


def test_a_writer_that_has_failed_may_have_missed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path, monkeypatch)
    writer.on_step(done(1))
    writer.on_end(None)
    writer = begin(tmp_path, monkeypatch, 9)
    writer.on_failure(writer, OSError("x"), 1)
    writer.on_end(None)
    assert receipts.read(tmp_path)["batch"]["global_batch_size"] == 9


def test_a_failure_and_the_first_step_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path, monkeypatch)
    path = receipts.part_file(tmp_path, 0)
    for number in (1, 2):
        writer.on_step(done(number))
        assert json.loads(path.read_text())["steps"] == 1
    writer.on_failure(Listener(), OSError("no space"), 3)
    writer.on_step(done(3))
    assert receipts.read(tmp_path)["notes"] == [
        "rank 0: Listener failed in step 3 and recorded nothing more: OSError: no space"
    ]


def test_the_memory_at_an_error_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = begin(tmp_path, monkeypatch)
    peak = {"kind": "CUDA allocator", "allocated_peak_bytes": 70, "reserved_peak_bytes": 80}
    monkeypatch.setattr(receipt_modules, "memory", lambda _: peak)
    writer.on_end(MemoryError())
    found = receipts.read(tmp_path)
    assert (found["status"], found["memory"]["allocated_peak_bytes"]) == ("MemoryError", 70)


def test_memory_that_cannot_be_read_loses_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand its details")

    why = "RuntimeError: CUDA error: an illegal memory access"
    writer = begin(tmp_path, monkeypatch)
    monkeypatch.setattr(receipt_modules, "memory", fail)
    writer.on_end(ArithmeticError())
    found = receipts.read(tmp_path)
    assert (found["status"], found["memory"]["allocated_peak_bytes"]) == ("ArithmeticError", 5)
    assert found["notes"] == [f"rank 0: the peaks of the memory are those of an earlier reading: {why}"]
    writer = begin(tmp_path / "never", monkeypatch)
    writer._part.pop("memory")
    monkeypatch.setattr(receipt_modules, "memory", fail)
    writer.on_end(ArithmeticError())
    assert receipts.read(tmp_path / "never")["unknown"]["memory"] == why


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    gone = [parts / ".rank_00000.json.77", tmp_path / ".receipt.json.77"]
    stays = [parts / ".rank_00001.json.77", parts / ".rank_00000.json.swp"]
    for file in (*gone, *stays):
        file.write_text("{")
    receipts.ReceiptWriter(tmp_path, 0)
    assert [file.exists() for file in (*gone, *stays)] == [False, False, True, True]


# --- Data -------------------------------------------------------------------------------------------------------------


def data_facts(**given: Any) -> dict[str, Any]:
    """What a run's arguments say of its data."""
    names = (
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "data_args_path",
        "per_split_data_args_path",
    )
    args = SimpleNamespace(
        **dict.fromkeys(names)
        | {"tokenizer_type": "NullTokenizer", "padded_vocab_size": 384, "fim_data": False}
        | given,
        mock_data=False,
        split=None,
    )
    facts = receipt_facts.Facts()
    receipt_facts._data(facts, args)
    return facts.values


def test_the_checksum_is_of_what_a_file_of_blends_lists(tmp_path: Path) -> None:
    for name, text in (("one", "a document\n"), ("two", "another document\n")):
        (tmp_path / f"{name}.txt").write_text(text * 20)
        prepare([str(tmp_path / f"{name}.txt")], str(tmp_path / name))
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    blend = ["0.25", one, "0.75", two]
    listed = tmp_path / "list"
    listed.write_text(" ".join(blend))
    plain, by_file = data_facts(data_path=blend), data_facts(data_args_path=str(listed))
    assert by_file == plain
    assert [(each["name"], each["weight"]) for each in by_file["data.datasets"]] == [("one", 0.25), ("two", 0.75)]
    listed.write_text(f"0.5 {one} 0.5 {two}")
    assert data_facts(data_args_path=str(listed))["data.checksum"] != plain["data.checksum"]
    moved = tmp_path / "moved"
    moved.write_text(" ".join(blend))
    assert data_facts(data_args_path=str(moved))["data.checksum"] == plain["data.checksum"]


def test_the_checksum_is_of_what_a_file_of_splits_lists(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a document\n" * 20)
    prepare([str(tmp_path / "one.txt")], str(tmp_path / "one"))
    one = str(tmp_path / "one")
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["3", one], "valid": [one], "test": None}))
    by_file = data_facts(per_split_data_args_path=str(splits))
    assert by_file == data_facts(train_data_path=["3", one], valid_data_path=[one])
    assert [each["weight"] for each in by_file["data.datasets"]] == [3.0, None]
    splits.write_text(json.dumps({"train": [one], "valid": ["3", one], "test": None}))
    assert data_facts(per_split_data_args_path=str(splits))["data.checksum"] != by_file["data.checksum"]
