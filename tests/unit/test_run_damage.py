"""What lies in a run's folder may be damaged anywhere: it is read, or refused with a DataError; nothing else comes of it."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, kinds, page, receipts, report_command, routing
from megacpp_mcore.observe.live import METRICS
from megacpp_mcore.observe.page import data as page_data
from megacpp_mcore.observe.receipts.schema import FINISHED, SCHEMA, why_unknown
from tests.unit.test_receipt_folder import write_steps
from tests.unit.test_receipts import lines
from tests.unit.tiny_run import ROOT

SECOND = 1_000_000_000
RECEIPT = ROOT / "examples" / "receipts" / "nam56r_quarter_h200_bf16.json"
HUGE = 10**400
DAMAGE: tuple[Any, ...] = (None, "text", -1, math.nan, math.inf, [], {}, True, HUGE)
SEED, SAMPLE = 1, 200


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
    for rank in (0, 1):
        part: dict[str, Any] = {
            "run": facts,
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
        part |= {"schema": SCHEMA, "rank": rank, "status": FINISHED, "warm_up_steps": 1, "notes": [], "steps": 4}
        part |= {"without_step": {"began": "then", "how": "SystemExit", "number": 1}}
        lines(receipts.part_file(run, rank), part)
        file = goodput.rank_file(run, rank)
        begun = {"began": 100 * SECOND, "host": "h", "pid": 7}
        steps = [{"at": (100 + number) * SECOND, "phases": {"step": SECOND, "data": 7}, "step": number, "resumed_at": 0}
                 for number in (1, 2, 3)]  # fmt: skip
        again = {"began": 120 * SECOND, "host": "h", "pid": 8, "died": 110 * SECOND}
        more = [{"at": (118 + number) * SECOND, "phases": {"step": SECOND}, "step": number, "resumed_at": 2}
                for number in (3, 4, 5, 6)]  # fmt: skip
        lines(file, begun, *steps, again, *more)
        file.with_suffix(".alive").write_text(f"{127 * SECOND:020d}\n")
    write_steps(run, (1, 0, 3.0), (2, 0, 2.9), (3, 0, 2.8), *((number, 2, 2.5) for number in (3, 4, 5, 6)))
    metrics = {
        "step": 1, "resumed_at": 0, "time_s": 1.0, "tokens": 1024, "losses": {"lm loss": 3.0}, "grad_norm": 1.0,
        "learning_rate": 1e-3, "skipped": 0, "tokens_per_s": 5.0, "mfu": None, "mfu_reason": "why", "goodput": 0.5,
        "memory_allocated_bytes": 5, "memory_reserved_bytes": 9, "routing_entropy": 0.9, "index_overlap": 0.5,
    }  # fmt: skip
    lines(run / METRICS, metrics, metrics | {"step": 2}, metrics | {"step": 4, "resumed_at": 2})
    table = {
        "steps": [3, 3], "phase": "steady", "rank": 0, "unit": "time", "dominant": "E", "trigger": "steps",
        "hidden_share": 0.75, "graph_recaptures": 0, "families": {"E": {"share": 0.6}, "A": {"share": 0.3}},
    }  # fmt: skip
    path = run / "profile" / "3-3" / "rank_00000" / "table.json"
    lines(path, table)
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
        lambda: said.extend(page_data.read(run).missing.values()),
        lambda: goodput.read(run),
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


FILES = ("parts/rank_00000.json", "parts/rank_00001.json", "goodput/rank_00000.jsonl", "steps.jsonl", METRICS,
         "profile/3-3/rank_00000/table.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("error")
def test_damage_anywhere_is_read_or_refused(tmp_path: Path, name: str) -> None:
    file = write_run(tmp_path / "run") / name
    rows = file.read_text().splitlines()
    cases = sample([(number, *case) for number, row in enumerate(rows) for case in mutations(json.loads(row))], SAMPLE)
    assert len(cases) > 100
    noticed = 0
    for number, path, damage in cases:
        fresh = json.dumps(damaged(json.loads(rows[number]), path, damage))
        file.write_text("\n".join([*rows[:number], fresh, *rows[number + 1 :]]) + "\n")
        try:
            noticed += "expected" in read_all(tmp_path / "run")
        except Exception as error:
            raise AssertionError(f"{name}, line {number + 1}: {path} {str(damage)[:9]}: {error!r}") from error
    assert noticed > len(cases) / 6  # most facts are rank 0's to say


def test_damage_anywhere_in_a_receipt_is_refused_or_shown(tmp_path: Path) -> None:
    file = tmp_path / "receipt.json"
    receipt = json.loads(RECEIPT.read_text(encoding="utf-8"))
    receipt |= {name: receipt[name][:1] for name in ("backends", "parts", "patches", "overlap")}
    receipt["routing"]["layers"] = dict(list(receipt["routing"]["layers"].items())[:1])
    receipt["ddp"]["buckets"] = receipt["ddp"]["buckets"][:1]
    receipt["flops"] = {"families": {}}
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
    lines(file, *rows)


@pytest.mark.parametrize(
    ("number", "values", "said"),
    [
        (1, {"phases": {"step": -5}}, r"line 2: .*phases\[step\] is '-5' \(int\); expected nanoseconds"),
        (1, {"phases": {"sleep": 5}}, r"a key of phases is 'sleep' \(str\); expected one of"),
        (2, {"step": "2"}, r"line 3: .*step is '2' \(str\); expected a whole number, 1 or more"),
        (2, {"step": 1}, r"line 3: .*step is 1 after 1 in one start; expected steps that ascend"),
        (6, {"step": 2}, r"line 7: .*step is 2 after 3"),
        (5, {"step": 2}, r"line 6: .*step is 2 after 2"),
        (0, {"began": 10**20}, r"line 1: .*began is '1000"),
        (4, {"died": -1}, r"line 5: .*died is '-1'"),
    ],
)
def test_impossible_numbers_of_goodput_are_named(
    tmp_path: Path, number: int, values: dict[str, Any], said: str
) -> None:
    run = write_run(tmp_path)
    change(goodput.rank_file(run, 0), number, **values)
    with pytest.raises(DataError, match=said):
        goodput.read(run)
    found = receipts.read(run)
    assert found["goodput"] is None
    assert f"line {number + 1}" in found["unknown"]["goodput"]
    assert found["loss"]["last"] == 2.5


def test_a_sign_of_life_that_is_no_time_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    goodput.rank_file(run, 1).with_suffix(".alive").write_text("99999999999999999999\n")
    with pytest.raises(
        DataError, match=r"rank_00001\.alive is 99999999999999999999; expected nanoseconds since the epoch"
    ):
        goodput.read(run)


def test_clocks_that_were_set_are_said(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    change(goodput.rank_file(run, 0), 4, began=90 * SECOND)
    year = 365 * 86400 * SECOND
    goodput.rank_file(run, 1).with_suffix(".alive").write_text(f"{time.time_ns() + year:020d}\n")
    ranks = goodput.read(run)
    (set_back,), (ahead,) = ranks[0].notes, ranks[1].notes
    assert "start 2 began 20.0 s before start 1 ended: a clock was set" in set_back
    assert "start 2 ends 315" in ahead
    assert "ahead of the clock of this machine" in ahead
    assert ranks[0].record()["notes"] == [set_back]
    notes = receipts.read(run)["notes"]
    assert f"rank 0: {set_back}" in notes
    assert any(note.startswith("rank 1: start 2 ends") for note in notes)
    assert "a clock was set" in page.html([run])


def test_a_part_of_another_rank_does_not_lose_the_receipt(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    part = json.loads(receipts.part_file(run, 1).read_text())
    part["memory"]["allocated_peak_bytes"] = "much"
    receipts.part_file(run, 1).write_text(json.dumps(part))
    receipts.part_file(run, 7).write_text("of an earlier start with more ranks")
    found = json.loads(receipts.write(run).read_text(encoding="utf-8"))
    assert (found["status"], found["ranks"]) == ("running", {"expected": 2, "found": [0]})
    (note,) = (note for note in found["notes"] if "left out" in note)
    assert "rank_00001.json" in note
    assert "memory.allocated_peak_bytes is 'much' (str); expected a whole number, 0 or more" in note
    assert found["throughput"]["tokens_per_s"] is not None


def test_a_training_ends_with_a_receipt_although_a_part_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    writer = receipts.ReceiptWriter(tmp_path, 0)
    receipts.part_file(tmp_path, 1).write_text('{"schema": 1, "rank": 1}')
    began = time.monotonic()
    writer.on_end(None)
    assert time.monotonic() - began < receipts.writer.PATIENCE_S  # it says nothing more
    found = receipts.read(tmp_path / "receipt.json")
    assert (found["status"], found["ranks"]) == ("running", {"expected": 2, "found": [0]})
    assert "rank_00001.json: not the part of a rank: it has no status, warm_up_steps, notes" in " ".join(found["notes"])


def test_what_an_earlier_start_left_damaged_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = receipts.part_file(tmp_path, 0)
    lines(path, {"schema": 1, "rank": 0, "status": "finished", "warm_up_steps": 3, "notes": 5})
    receipts.ReceiptWriter(tmp_path, 0)
    assert "notes is '5' (int); expected a list" in caplog.text
    assert receipts.read(tmp_path)["status"] == "running"


def test_a_fact_that_no_field_can_hold_is_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    part = json.loads(receipts.part_file(run, 0).read_text())
    part["run"] |= {"parallelism.tensor": 0, "device": "\x1b[31mred\ud800"}
    receipts.part_file(run, 0).write_text(json.dumps(part))
    found = receipts.read(run)
    assert (
        found["unknown"]["parallelism.tensor"] == "parallelism.tensor is '0' (int); expected a whole number, 1 or more"
    )
    assert found["device"] == r"\x1b[31mred\ud800"


def test_ranks_that_differ_in_their_experts_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    part = json.loads(receipts.part_file(run, 1).read_text())
    part["routing"] |= {"layers": {"2": routing.Load((1, 2, 3), 6).record()}, "not_counted": {}}
    receipts.part_file(run, 1).write_text(json.dumps(part))
    assert "2 experts on one rank and 3 on another" in receipts.read(run)["unknown"]["routing.layers"]


def test_steps_without_time_have_no_speed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for rank in (0, 1):
        file = goodput.rank_file(run, rank)
        rows = [json.loads(row) for row in file.read_text().splitlines()]
        lines(file, *(row | ({"phases": dict.fromkeys(row["phases"], 0)} if "phases" in row else {}) for row in rows))
    found = receipts.read(run)
    assert found["step_time"]["p50_s"] is None
    assert "took no time" in (why_unknown("throughput.tokens_per_s", found["unknown"]) or "")
    assert "tokens/s" in report_command.describe(found)


@pytest.mark.parametrize("kind", ["dangling", "loop", "pipe", "folder"])
def test_what_is_no_regular_file_is_no_rank(tmp_path: Path, kind: str) -> None:
    run = write_run(tmp_path)
    odd = goodput.rank_file(run, 5)
    make = {
        "dangling": lambda: odd.symlink_to(tmp_path / "nothing"),
        "loop": lambda: odd.symlink_to(odd),
        "pipe": lambda: os.mkfifo(odd),
        "folder": odd.mkdir,
    }
    make[kind]()
    with pytest.raises(DataError, match=r"rank_00005\.jsonl is no regular file"):
        goodput.read(run)
    assert receipts.read(run)["goodput"]["rank"] in (0, 1)  # an earlier start had more ranks


def test_a_file_without_a_rank_in_its_name_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "goodput" / "rank_x.jsonl").write_text("")
    with pytest.raises(DataError, match=r"rank_x\.jsonl names no rank; expected a name such as rank_00000\.jsonl"):
        goodput.read(run)


def test_a_rank_without_time_is_not_the_slowest(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    goodput.rank_file(run, 1).write_text("")
    ranks = goodput.read(run)
    assert ranks[1].wall_ns == 0
    assert goodput.slowest(ranks) == 0
    assert goodput.slowest({1: ranks[1]}) == 1
    assert receipts.read(run)["goodput"]["rank"] == 0


@pytest.mark.parametrize("depth", [40, 100_000])
@pytest.mark.parametrize("name", FILES)
def test_what_lies_too_deep_is_noticed(tmp_path: Path, name: str, depth: int) -> None:
    file = write_run(tmp_path / "run") / name
    file.write_text('{"step": ' + "[" * depth + "]" * depth + "}\n" + file.read_text())
    assert "expected" in read_all(tmp_path / "run")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_regular_file_is_noticed(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    file = write_run(tmp_path / "run") / name
    file.unlink()
    make(file)
    assert "expected" in read_all(tmp_path / "run")


# --- A receipt alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("disqualifiers", 5, "disqualifiers is '5' (int); expected a list"),
        ("goodput", {}, "goodput has no rank, goodput, wall_s"),
        ("step_time.p50_s", HUGE, "expected a finite number above 0"),
        ("throughput.tokens_per_s", -5, "throughput.tokens_per_s is '-5' (int); expected a finite number above 0"),
        ("optimizer", {"lr": math.nan}, "optimizer[lr] is 'nan' (float)"),
        ("model.definition", {"moe": {"experts": math.inf}}, "model.definition[moe][experts] is 'inf'"),
        ("routing.settings", {"a\x1b": 1}, r"a key of routing.settings is 'a\x1b' (str); expected a text of printable"),
        ("routing.layers", {"2": {"asked": 1}}, "routing.layers[2] has no tokens_per_expert"),
        ("device", "H200\x1b]0;title\x07", "device is 'H200\\x1b]0;title\\x07' (str); expected a text of printable"),
        ("commit", "\ud800", "expected a text of printable characters"),
        (
            "schema",
            2,
            "schema is 2; expected 1: a newer version wrote it: update megacpp-mcore, which reads schemas up to 1",
        ),
    ],
)
def test_what_a_receipt_cannot_hold_is_named(tmp_path: Path, path: str, value: Any, said: str) -> None:
    receipt = json.loads(RECEIPT.read_text(encoding="utf-8"))
    group, _, name = path.rpartition(".")
    (receipt[group] if group else receipt)[name] = value
    file = tmp_path / "receipt.json"
    file.write_text(json.dumps(receipt))
    with pytest.raises(DataError) as raised:
        receipts.read(file)
    assert said in str(raised.value)
    assert kinds.is_printable(str(raised.value))
    assert "report show" not in str(raised.value)


@pytest.mark.parametrize("depth", [40, 100_000])
def test_a_receipt_that_is_too_deep_is_refused(tmp_path: Path, depth: int) -> None:
    file = tmp_path / "receipt.json"
    file.write_text('{"schema": 1, "optimizer": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(DataError, match="expected a receipt"):
        receipts.read(file)


def test_the_dominant_cost_of_a_count_is_said_to_be_of_flops(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert "largest share of FLOPs" not in page.html([run])
    (run / "profile" / "3-3" / "rank_00000" / "table.json").unlink()
    found = receipts.read(run)
    assert f"{found['dominant_cost']} has the largest share of FLOPs; only a profile" in " ".join(found["notes"])
    assert f"{found['dominant_cost']} (largest share of FLOPs, not timed)" in page.html([run])
