"""``megacpp-mcore bench``: the registry is complete, rows are compared fairly."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_mcore.backends import own_candidates
from megacpp_mcore.backends.candidates import EXPERTS
from megacpp_mcore.bench import measure
from megacpp_mcore.bench.catalog import BENCHMARKS, LAYER, OP
from megacpp_mcore.bench.csv_table import (
    COLUMNS,
    CONDITIONS,
    GREEN,
    IS_REFERENCE,
    TIMED,
    compare,
    read,
)
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model import preset
from megacpp_mcore.util import host
from tests.errors import raises

ROOT = Path(__file__).parents[2]
OTHER = str(ROOT / "experiments" / "results" / "train_h200.csv")


def test_every_op_and_every_kind_of_layer_has_a_benchmark() -> None:
    ops = {entry.covers for entry in BENCHMARKS.values() if entry.kind == OP}
    assert {candidate.op for candidate in own_candidates()} <= ops | {EXPERTS}  # their rows are the E layer's
    packages = {path.name for path in (ROOT / "megacpp_mcore" / "ops").iterdir() if (path / "reference.py").exists()}
    assert packages <= ops | {"grouped_fp8"}  # which no layer uses: `doctor` calls it
    model = preset("nam56r")
    kinds = {letter + (role or "") for letter, role in zip(model.layers, model.roles, strict=True)}
    assert {entry.covers for entry in BENCHMARKS.values() if entry.kind == LAYER} == kinds | {"mtp"}


def test_the_list_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--size", "tiny"]):
        assert cli.main(["bench", "list", *more]) == 0
        assert {*BENCHMARKS} <= {line.split(" ")[0] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("mamba", "'mamba'; did you mean 'mamba3'"),
        ("zzz", "'zzz'; known: mla, mla_packed, mla_window"),
        ("", "--all"),
        ("mla --all", "not both"),
        ("mla --set heads=x", "'heads=x'"),
        ("mla --set width=3", "'width'; expected one of B, S, heads, qk, v"),
        ("mla --set heads=0 --set S=3", "heads is 0"),
        ("mla m2rnn --set S=3", "2 are named"),
        ("mla --device cpu --size tiny --output .", "is not a regular file"),
        ("mla --device cpu --size tiny --output /dev/full", "/dev/full is not a regular file"),
        (f"mla --device cpu --size tiny --output {OTHER}/rows.csv", "rows.csv cannot be written"),
        ("mla --device cpu --against nowhere.csv", "nowhere.csv cannot be read"),
        (f"mla --device cpu --size tiny --output {OTHER}", "train_h200.csv begins with 'label"),
        (f"mla --device cpu --size tiny --against {OTHER}", "train_h200.csv begins with 'label"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "run", *words.split()]) == cli.USER_ERROR
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--tolerance nan", "--seconds -1"])
def test_what_is_no_number_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    option, value = words.split()
    with pytest.raises(SystemExit):
        cli.main(["bench", "run", "mla", *words.split()])
    assert f"{option}: found {value!r}" in capsys.readouterr().err


Row = dict[str, str]


def row(**changes: str) -> Row:
    made = dict.fromkeys(COLUMNS, "") | dict.fromkeys(CONDITIONS, "same")
    made |= {"benchmark": "mla", "work": "forward", "variant": "sdpa", "ms": "2.0", "peak_bytes": "1000"}
    return made | {"parity": "green"} | changes


def table_of(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as sink:
        writer = csv.DictWriter(sink, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    "damage",
    [lambda text: "", lambda text: text[:-40], lambda text: text[:-1], lambda text: text[:-1] + ",more\n"],
    ids=["empty", "cut", "newline", "wide"],
)  # fmt: skip
def test_a_damaged_table_is_no_baseline(tmp_path: Path, damage: Callable[[str], str]) -> None:
    table = table_of(tmp_path / "rows.csv", row(), row(work="both"))
    table.write_text(damage(table.read_text()))
    with pytest.raises(BenchmarkError, match=r"rows\.csv.*(expected|cannot be read)"):
        read(table)


SDPA = "mla / forward / sdpa"
LOST = "was 2.0 ms, and has no row in this run"
ON_SDPA, FELL_BACK = (
    {"benchmark": "layer_a_full", "kind": LAYER, "variant": f"ours (mla {name})"} for name in ("sdpa", "reference")
)
OURS_WAS = "layer_a_full / forward / ours, which was ours (mla sdpa)"


@pytest.mark.parametrize(
    ("before", "now", "slower", "lines"),
    [
        # Within the tolerance, beyond it, and better; the last row of the file counts, of those that are right.
        ([row()], [row(ms="2.19", peak_bytes="1090")], [], [f"{SDPA}: 2 → 2.19 ms (1.09x): as before"]),
        (
            [row()],
            [row(ms="2.3", peak_bytes="1200")],
            [f"{SDPA}: 2 → 2.3 ms (1.15x): slower", f"{SDPA}: 0.001 → 0.0012 MB (1.20x): more memory"],
            [],
        ),
        ([row(ms="1.0"), row(ms="2.0")], [row(ms="1.0")], [], [f"{SDPA}: 2 → 1 ms (0.50x): faster"]),
        ([row(ms="1.0"), row(ms="9.0", parity="FAILS: worst row o")], [row()], [f"{SDPA}: 1 → 2 ms (2.00x): slower"], []),
        # A time that was lost, and a row.
        ([row()], [row(ms="", parity="FAILS: o")], [f"{SDPA}: was 2.0 ms, and has no time now (FAILS: o)"], []),
        ([row(variant="gone")] * 2, [row(variant="renamed")], [f"mla / forward / gone: {LOST}"], None),
        ([row(), row(work="both")], [row()], [f"mla / both / sdpa: {LOST}"], None),
        # What did not run now, or was not right, is not missed.
        *(
            ([row(), row(variant="gone", **change)], [row()], [], None)
            for change in (
                {"benchmark": "m2rnn"}, {"shape": "B=9"}, {"dtype": "float32"}, {"device": "another"}, {"ms": ""},
                {"parity": "not checked"},
            )
        ),
        # A layer is compared with its own earlier row; for an op, the bracket is part of the name.
        ([row(**ON_SDPA)], [row(**FELL_BACK, ms="9.0")], [f"{OURS_WAS}: 2 → 9 ms (4.50x): slower"], []),
        ([row(**ON_SDPA)], [row(**FELL_BACK)], [], [f"{OURS_WAS}: 2 → 2 ms (1.00x): as before"]),
        (
            [row()],
            [row(), row(variant="sdpa (sum)")],
            [],
            [f"{SDPA}: 2 → 2 ms (1.00x): as before", f"{SDPA} (sum): new, the file has no baseline of it"],
        ),
    ],
)  # fmt: skip
def test_rows_are_compared_with_the_last_of_their_name(
    before: list[Row], now: list[Row], slower: list[str], lines: list[str] | None
) -> None:
    comparison = compare(before, now, 0.1)
    assert comparison.slower == slower
    assert lines is None or comparison.lines == lines


@pytest.mark.parametrize(
    ("change", "values"),
    [
        *(({"parity": parity}, ("no baseline",)) for parity in ("FAILS: worst row o 1.0e+00", "not checked", "")),
        *(({name: "another"}, (name, "same", "another")) for name in CONDITIONS),
    ],
)
def test_a_row_of_the_wrong_result_or_of_other_conditions_is_no_baseline(change: Row, values: tuple[str, ...]) -> None:
    other = row(**change)
    with raises(BenchmarkError, *values):
        compare([other], [row(ms="9.0")], 0.1)
    together = compare([other, row(work="both")], [row(ms="9.0"), row(work="both")], 0.1)
    assert (together.compared, together.slower) == (1, [])
    assert any(line.startswith(SDPA) and all(value in line for value in values) for line in together.lines)


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "bench", "run", *words]
    command += ["--device", "cpu", "--size", "tiny", "--seconds", "0"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_everything_runs_at_its_tiny_size(tmp_path: Path) -> None:
    done = bench("--all", "--dtype", "bfloat16", "--output", str(tmp_path / "rows.csv"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with (tmp_path / "rows.csv").open(newline="") as source:
        rows = list(csv.DictReader(source))
    assert tuple(rows[0]) == COLUMNS
    assert {record["benchmark"] for record in rows} == set(BENCHMARKS)
    for record in rows:
        timed = record["ms"] != ""
        assert timed is (record["note"] == ""), record
        assert timed is (record["parity"] in TIMED), record
        assert record["speed_up"] == "" or record["parity"] == GREEN, record
        assert (record["speed_up"] != "") <= (record["side"] == "ours" and record["against"] != ""), record
        # At the tiny size a selection takes every key.
        selects = (record["benchmark"], record["work"]) == ("indexer", "forward")
        multiplies = record["benchmark"] not in ("router", "rms_norm")  # the router is behind the product
        assert int(record["floor_operations"]) > 0 or selects or not multiplies, record
        assert int(record["floor_bytes"]) > 0
        assert record["torch"] != "absent"
    themselves = {record["benchmark"] for record in rows if record["parity"] == IS_REFERENCE}
    assert themselves == {entry.name for entry in BENCHMARKS.values() if entry.kind == LAYER}  # on a CPU, all of them
    ours = {record["benchmark"] for record in rows if record["side"] == "ours" and record["ms"]}
    assert ours == {record["benchmark"] for record in rows}
    peers = {record["benchmark"] for record in rows if record["side"] == "peer"}
    assert peers == ours
    assert any(record["variant"] == "torch._grouped_mm" and record["parity"] == "green" for record in rows)


def test_rows_name_what_they_were_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_COMMIT", "abc1234")
    recorded = measure.versions("torch", "no-such-package")
    assert (recorded["commit"], recorded["no-such-package"]) == ("abc1234", "absent")
    facts = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "CPU_FACTS", facts)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert measure.device_name("cpu") == "aarch64"
    facts.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2.0GHz\nprocessor\t: 1\n")
    assert measure.device_name("cpu") == "Some CPU @ 2.0GHz"
