"""What lies in a run's folder may be damaged anywhere: it is read, or refused with a DataError; nothing else comes of it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import report as report_command
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, page, receipts, routing
from megacpp_mcore.observe.events import FINISHED
from megacpp_mcore.observe.receipts.schema import flatten, why_unknown
from tests.observe.recorded import at, file_of, stepped, with_loss, write_start
from tests.tiny_run import ROOT

RECEIPT = json.loads((ROOT / "examples" / "receipts" / "nam56r_quarter_h200_bf16.json").read_text(encoding="utf-8"))
GONE = object()
DAMAGE: tuple[Any, ...] = (None, "text", -1, math.nan, math.inf, [], {}, True, GONE)
SEED, SAMPLE = 1, 80
FILES = ("start_1/rank_00000.jsonl", "start_2/rank_00000.jsonl", "start_2/rank_00001.jsonl",
         "profile/3-3/rank_00000/table.json")  # fmt: skip
PEAK = "memory.allocated_peak_bytes"


def write_run(run: Path) -> Path:
    """All that two ranks leave of a killed start and the one that goes on after it."""
    groups = ("batch", "data", "model", "indexer", "parallelism", "compile")
    names = ("device", "pattern", "flops", "optimizer", "patches", "versions", "overlap")
    facts = {path: value for path, value in flatten(RECEIPT).items() if path.partition(".")[0] in (*groups, *names)}
    facts |= {"moe_enabled": True, "parallelism.world_size": 2, "environment": {"OMP_NUM_THREADS": "1"},
              "model.definition": {"depth": 2}, "routing.forced_balance": False}  # fmt: skip
    backend = RECEIPT["backends"][0]
    known = {
        **facts, "unknown": {"commit": "no checkout"}, "failed": ["a listener"],
        "noted": [backend], "memory.kind": "CUDA allocator", PEAK: 5, "memory.reserved_peak_bytes": 9,
        "cache.files": {"triton": 3}, "cache.added": {"triton": 0},
        "routing": {"layers": {"2": routing.Load((3, 5), 8).record()}, "not_counted": {"4": routing.CAPTURED}},
        "backends": [backend], "ddp.grad_reduce_dtype": ["float32"],
    }  # fmt: skip
    metrics = {
        "step": 1, "resumed_at": 0, "skipped": 0, "tokens_per_s": 5.0, "mfu": None, "mfu_reason": "why", "goodput": 0.5,
        "memory_allocated_bytes": 5, "memory_reserved_bytes": 9, "routing_entropy": 0.9,
    }  # fmt: skip
    table = {
        "steps": [3, 3], "phase": "steady", "rank": 0, "unit": "time", "dominant": "E",
        "hidden_share": 0.75, "families": {"E": {"share": 0.6}, "A": {"share": 0.3}},
    }  # fmt: skip
    for rank in (0, 1):
        steps = [stepped(100 + number, number, data=0.1) for number in (1, 2, 3)]
        again = [stepped(118 + number, number, resumed_at=2) for number in (3, 4, 5, 6)]
        if rank:
            steps, again = ([with_loss(step, 3 - step["step"] / 10) for step in one] for one in (steps, again))
        write_start(run, 1, rank, *steps, at(100.6, metrics=metrics), at(110), began=100, world_size=2)
        shown = at(126, metrics=metrics | {"step": 4, "resumed_at": 2})
        ended = at(127, {}, how=FINISHED)
        write_start(run, 2, rank, *again, at(125, facts=known), shown, ended, began=120, world_size=2)
    (run / FILES[-1]).parent.mkdir(parents=True)
    (run / FILES[-1]).write_text(json.dumps(table))
    return run


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in ``value``."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


def damaged(value: Any, path: tuple[Any, ...], damage: Any) -> Any:
    """``value`` with one thing in it replaced, or gone."""
    holder = fresh = [copy.deepcopy(value)]
    for key in (0, *path)[:-1]:
        holder = holder[key]
    if damage is GONE and isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder[(0, *path)[-1]] = None if damage is GONE else damage
    return fresh[0]


@pytest.fixture(autouse=True)
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves as tables: hundreds of pages are made here."""
    monkeypatch.setattr(page, "can_draw", lambda: False)


def read_all(run: Path) -> str:
    """Read the run in every way, each of which may refuse it; return all that was said of it."""
    said: list[str] = []

    def receipt() -> None:
        found = receipts.read(run)
        report_command.describe(found).encode()
        said.extend([*found["unknown"].values(), *found["notes"], page.read(run).missing])

    for read in (receipt, lambda: page.html(run).encode(), lambda: goodput.read(run)):
        try:
            read()
        except DataError as error:
            said.append(str(error))
    return "\n".join(said)


def test_the_folder_itself_is_good(tmp_path: Path) -> None:
    found = receipts.read(write_run(tmp_path / "run"))
    assert "expected" not in read_all(tmp_path / "run")
    assert found["status"] == FINISHED
    assert found["throughput"]["tokens_per_s"] is not None
    unknown = {path: why_unknown(path, found["unknown"]) for path in flatten(found) if flatten(found)[path] is not None}
    assert set(unknown.values()) == {None}
    assert not any("left out" in note or "clock" in note for note in found["notes"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("error")
def test_damage_anywhere_is_read_or_refused(tmp_path: Path, name: str) -> None:
    file = write_run(tmp_path / "run") / name
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    cases = [(number, path, how) for number, row in enumerate(rows) for path in nodes(row) for how in DAMAGE]
    noticed = 0
    for number, path, damage in random.Random(SEED).sample(cases, SAMPLE):
        fresh = [*rows[:number], damaged(rows[number], path, damage), *rows[number + 1 :]]
        file.write_text("".join(json.dumps(row) + "\n" for row in fresh))
        try:
            noticed += "expected" in read_all(tmp_path / "run")
        except Exception as error:
            raise AssertionError(f"{name}, line {number + 1}: {path} {damage!r}: {error!r}") from error
    assert noticed > SAMPLE / 6  # most facts are rank 0's


def test_damage_anywhere_in_a_receipt_is_refused_or_shown(tmp_path: Path) -> None:
    file, receipt = tmp_path / "receipt.json", copy.deepcopy(RECEIPT)
    receipt |= {name: receipt[name][:1] for name in ("backends", "patches", "overlap")}
    receipt["routing"]["layers"] = dict(list(receipt["routing"]["layers"].items())[:1])
    refused = 0
    for path, damage in random.Random(SEED).sample(list(itertools.product(nodes(receipt), DAMAGE)), 4 * SAMPLE):
        file.write_text(json.dumps(damaged(receipt, path, damage)))
        try:
            found = receipts.read(file)
            page.html(file).encode()
            report_command.describe(found).encode()
        except DataError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path} {damage!r}: {error!r}") from error
    assert refused > 2 * SAMPLE


# --- What is said -----------------------------------------------------------------------------------------------------


def change(file: Path, has: str, **values: Any) -> None:
    """Change fields of the lines that have the field ``has``, those of facts one by one."""
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    for row in rows:
        if has in row:
            row |= {has: row[has] | values} if has == "facts" else values
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_damaged_rank_does_not_lose_the_receipt(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    change(file_of(run, 2, 1), "facts", **{PEAK: "much"})
    stale = write_start(run, 1, 7, {"at": -1}, world_size=8)
    found = json.loads(receipts.write(run).read_text(encoding="utf-8"))
    assert (found["status"], found["ranks"]) == ("running", {"expected": 2, "found": [0]})
    (note,) = (note for note in found["notes"] if "left out" in note)
    assert note.startswith(f"rank 1 is left out: {file_of(run, 2, 1)}: ")
    assert "facts.memory.allocated_peak_bytes is 'much' (str); expected a whole number, 0 or more" in note
    assert found["throughput"]["tokens_per_s"] is not None
    stale.unlink()
    change(file_of(run, 2, 0), "step", phases={"step": -5})
    with pytest.raises(DataError, match=rf"{file_of(run, 2, 0)}, line 2: .*phases\[step\] is -5"):
        goodput.read(run)


def test_a_fact_that_no_field_can_hold_is_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    change(file_of(run, 2, 0), "facts", **{"parallelism.tensor": 0, "device": "\x1b[31mred\ud800"})
    found = receipts.read(run)
    assert found["unknown"]["parallelism.tensor"] == "parallelism.tensor is 0 (int); expected a whole number, 1 or more"
    assert found["device"] == r"\x1b[31mred\ud800"


def test_steps_without_time_have_no_speed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for rank in (0, 1):
        change(file_of(run, 2, rank), "step", phases={"step": 0})
    found = receipts.read(run)
    assert found["step_time"]["p50_s"] is None
    assert "took no time" in (why_unknown("throughput.tokens_per_s", found["unknown"]) or "")
    assert "tokens/s" in report_command.describe(found)
