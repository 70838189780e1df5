"""What lies in a run's folder may be damaged anywhere: it is read, or refused with a DataError; nothing else comes of it."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import report as report_command
from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, page, receipts, routing, start
from megacpp_mcore.observe.events import FINISHED
from megacpp_mcore.observe.receipts.schema import why_unknown
from tests.observe.recorded import at, file_of, stepped, with_loss, write_start
from tests.tiny_run import ROOT

RECEIPT = ROOT / "examples" / "receipts" / "nam56r_quarter_h200_bf16.json"
DAMAGE: tuple[Any, ...] = (None, "text", -1, math.nan, math.inf, [], {}, True)
SEED, SAMPLE = 1, 80


def write_run(run: Path) -> Path:
    """All that two ranks leave of a killed start and the one that goes on after it."""
    receipt = json.loads(RECEIPT.read_text(encoding="utf-8"))
    facts = {f"{group}.{name}": value for group in ("batch", "data", "model", "indexer", "parallelism", "compile")
             for name, value in receipt[group].items()}  # fmt: skip
    facts |= {
        name: receipt[name] for name in ("device", "pattern", "flops", "optimizer", "patches", "versions", "overlap")
    }
    facts |= {"moe_enabled": True, "parallelism.world_size": 2, "environment": {"OMP_NUM_THREADS": "1"},
              "model.definition": {"depth": 2}, "routing.forced_balance": False}  # fmt: skip
    backend = receipt["backends"][0]
    metrics = {
        "step": 1, "resumed_at": 0, "skipped": 0, "tokens_per_s": 5.0, "mfu": None, "mfu_reason": "why", "goodput": 0.5,
        "memory_allocated_bytes": 5, "memory_reserved_bytes": 9, "routing_entropy": 0.9, "index_overlap": 0.5,
    }  # fmt: skip
    for rank in (0, 1):
        known: dict[str, Any] = {
            "run": facts,
            "warm_up_steps": 1,
            "notes": [],
            "unknown": {"commit": "no checkout"},
            "failed": ["a listener"],
            "noted": [backend],
            "memory": {"kind": "CUDA allocator", "allocated_peak_bytes": 5, "reserved_peak_bytes": 9},
            "cache": {"files": {"triton": 3}, "added": {"triton": 0}},
            "moe": {"dispatchers": ["Dispatcher"], "shared_expert_overlap": [False], "top_k": [2]},
            "routing": {
                "layers": {"2": routing.Load((3, 5), 8).record()},
                "router_dtypes": {"2": "float32"},
                "index_overlap": {"1-4": 0.5},
                "not_counted": {"4": routing.CAPTURED},
            },
            "local": {
                "backends": [backend],
                "parts": receipt["parts"][:1],
                "buckets": receipt["ddp"]["buckets"][:1],
                "overlap_grad_reduce": False,
            },
        }
        first = {"1": {"family": "A", "branch": [8, 2], "residual": [4, 4], "gradient": 9}}
        lines = [at(100.5, first_step={"grad_norm": 1.0, "parts": first}), at(100.6, metrics=metrics)]
        steps = [stepped(100 + number, number, data=0.1) for number in (1, 2, 3)]
        again = [stepped(118 + number, number, resumed_at=2) for number in (3, 4, 5, 6)]
        if rank:
            steps, again = ([with_loss(step, 3 - step["step"] / 10) for step in one] for one in (steps, again))
        write_start(run, 1, rank, *steps, *lines, at(110), began=100, world_size=2)
        ended = [
            at(125, facts=known),
            at(126, metrics=metrics | {"step": 4, "resumed_at": 2}),
            at(127, {}, how=FINISHED),
        ]
        write_start(run, 2, rank, *again, *ended, began=120, world_size=2)
    table = {
        "steps": [3, 3], "phase": "steady", "rank": 0, "unit": "time", "dominant": "E", "trigger": "steps",
        "hidden_share": 0.75, "graph_recaptures": 0, "families": {"E": {"share": 0.6}, "A": {"share": 0.3}},
    }  # fmt: skip
    path = run / "profile" / "3-3" / "rank_00000" / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(table))
    return run


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in ``value``."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from nodes(value[key], (*path, key))


GONE = object()


def mutations(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Where ``value`` may be damaged, and by what."""
    named = [path for path in nodes(value) if path and isinstance(path[-1], str)]
    return [*((path, damage) for path in nodes(value) for damage in DAMAGE), *((path, GONE) for path in named)]


def damaged(value: Any, path: tuple[Any, ...], damage: Any) -> Any:
    """``value`` with one thing in it replaced, or gone."""
    if not path:
        return damage
    fresh = copy.deepcopy(value)
    holder = fresh
    for key in path[:-1]:
        holder = holder[key]
    if damage is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = damage
    return fresh


def sample(cases: list[Any], most: int) -> list[Any]:
    return cases if len(cases) <= most else random.Random(SEED).sample(cases, most)


@pytest.fixture(autouse=True)
def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves as tables: a thousand pages are made here."""
    monkeypatch.setattr(page, "can_draw", lambda: False)


def read_all(run: Path) -> str:
    """Read the run in every way, each of which may refuse it; return all that was said of it."""
    said: list[str] = []
    try:
        found = receipts.read(run)
        report_command.describe(found).encode()
        said += [*found["unknown"].values(), *found["notes"]]
    except DataError as error:
        said.append(str(error))
    others: tuple[Callable[[], object], ...] = (
        lambda: page.html([run]).encode(),
        lambda: said.append(page.read(run).missing),
        lambda: goodput.read(run),
        lambda: start.read(run),
    )
    for read in others:
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
    for path in ("goodput", "step_time", "profiler", "memory", "loss", "backends", "shares", "routing.layers", "flops"):
        assert why_unknown(path, found["unknown"]) is None or path == "routing.layers", path
    assert not any("left out" in note or "clock" in note for note in found["notes"])


FILES = ("start_1/rank_00000.jsonl", "start_2/rank_00000.jsonl", "start_2/rank_00001.jsonl",
         "profile/3-3/rank_00000/table.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("error")
def test_damage_anywhere_is_read_or_refused(tmp_path: Path, name: str) -> None:
    file = write_run(tmp_path / "run") / name
    rows = file.read_text().splitlines()
    cases = sample([(number, *case) for number, row in enumerate(rows) for case in mutations(json.loads(row))], SAMPLE)
    assert len(cases) == SAMPLE
    noticed = 0
    for number, path, damage in cases:
        fresh = json.dumps(damaged(json.loads(rows[number]), path, damage))
        file.write_text("\n".join([*rows[:number], fresh, *rows[number + 1 :]]) + "\n")
        try:
            noticed += "expected" in read_all(tmp_path / "run")
        except Exception as error:
            raise AssertionError(f"{name}, line {number + 1}: {path} {str(damage)[:9]}: {error!r}") from error
    assert noticed > len(cases) / 6  # most facts are rank 0's


def test_damage_anywhere_in_a_receipt_is_refused_or_shown(tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    receipt = json.loads(RECEIPT.read_text(encoding="utf-8"))
    receipt |= {name: receipt[name][:1] for name in ("backends", "parts", "patches", "overlap")}
    receipt["routing"]["layers"] = dict(list(receipt["routing"]["layers"].items())[:1])
    receipt["ddp"]["buckets"] = receipt["ddp"]["buckets"][:1]
    receipt["flops"]["families"] = {name: {"share": 0.1} for name in receipt["flops"]["families"]}
    refused = 0
    for path, damage in sample(mutations(receipt), 4 * SAMPLE):
        file.write_text(json.dumps(damaged(receipt, path, damage)))
        try:
            found = receipts.read(file)
            page.html([file]).encode()
            report_command.describe(found).encode()
        except DataError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{path} {str(damage)[:9]}: {error!r}") from error
    assert refused > 2 * SAMPLE


# --- What is said -----------------------------------------------------------------------------------------------------


def change(file: Path, number: int, **values: Any) -> None:
    """Change fields of a line, from 0."""
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    rows[number] |= values
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_facts(folder: Path, rank: int, **values: Any) -> None:
    """Change what a rank knows in the end."""
    file = file_of(folder, 2, rank)
    (number,) = (at for at, row in enumerate(file.read_text().splitlines()) if "facts" in json.loads(row))
    change(file, number, facts=json.loads(file.read_text().splitlines()[number])["facts"] | values)


def test_a_damaged_rank_does_not_lose_the_receipt(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    memory = {"kind": "CUDA allocator", "allocated_peak_bytes": "much", "reserved_peak_bytes": 9}
    change_facts(run, 1, memory=memory)
    stale = write_start(run, 1, 7, {"at": -1}, world_size=8)
    found = json.loads(receipts.write(run).read_text(encoding="utf-8"))
    assert (found["status"], found["ranks"]) == ("running", {"expected": 2, "found": [0]})
    (note,) = (note for note in found["notes"] if "left out" in note)
    assert note.startswith(f"rank 1 is left out: {file_of(run, 2, 1)}: ")
    assert "facts.memory.allocated_peak_bytes is 'much' (str); expected a whole number, 0 or more" in note
    assert found["throughput"]["tokens_per_s"] is not None
    stale.unlink()
    change(file_of(run, 2, 0), 1, phases={"step": -5})
    with pytest.raises(DataError, match=rf"{file_of(run, 2, 0)}, line 2: .*phases\[step\] is -5"):
        goodput.read(run)


def test_a_fact_that_no_field_can_hold_is_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    change_facts(run, 0, run={"parallelism.tensor": 0, "device": "\x1b[31mred\ud800"})
    found = receipts.read(run)
    assert found["unknown"]["parallelism.tensor"] == "parallelism.tensor is 0 (int); expected a whole number, 1 or more"
    assert found["device"] == r"\x1b[31mred\ud800"


def test_steps_without_time_have_no_speed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for rank, number in itertools.product((0, 1), range(1, 5)):
        change(file_of(run, 2, rank), number, phases={"step": 0})
    found = receipts.read(run)
    assert found["step_time"]["p50_s"] is None
    assert "took no time" in (why_unknown("throughput.tokens_per_s", found["unknown"]) or "")
    assert "tokens/s" in report_command.describe(found)


def test_time_and_operations_are_two_answers(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    found = receipts.read(run)
    assert (found["dominant_time"], found["dominant_flops"]) == ("expert", "head")
    assert found["shares"]["source"].startswith("profile")
    (run / "profile" / "3-3" / "rank_00000" / "table.json").unlink()
    found = receipts.read(run)
    assert (found["dominant_time"], found["dominant_flops"]) == (None, "head")
    assert why_unknown("dominant_time", found["unknown"]) == "the run was not profiled"
    assert found["shares"]["source"].startswith("audited count")
