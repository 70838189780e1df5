"""How benchmarks measure: the time of a call, what the processor is called, the table that rows are added to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megacpp_mcore.bench import measure
from megacpp_mcore.bench.measure import Table
from megacpp_mcore.errors import BenchmarkError


def test_the_median_of_calls_on_a_cpu() -> None:
    calls: list[int] = []
    ms, repeats = measure.median_ms(lambda: (calls.append(1), time.sleep(0.02)), "cpu", 0.05)
    assert 15 < ms < 200
    assert 1 <= repeats <= len(calls)


def test_a_cpu_has_the_name_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some CPU @ 2.0GHz\nprocessor\t: 1\n")
    monkeypatch.setattr(measure, "CPU_FACTS", facts)
    assert measure.device_name("cpu") == "Some CPU @ 2.0GHz"
    facts.write_text("processor\t: 0\n")
    for place in (facts, tmp_path / "nowhere"):
        monkeypatch.setattr(measure, "CPU_FACTS", place)
        monkeypatch.setattr("platform.processor", lambda: "")
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
        assert measure.device_name("cpu") == "aarch64"


# --- the table ----------------------------------------------------------------------------------------------------------


def test_rows_are_added_to_a_table_that_the_first_ones_make(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.csv"
    table = Table(path, ("a", "b"))
    assert not path.parent.exists()  # nothing is left where nothing was measured
    table.append({"a": 1, "b": "x, y"})
    Table(path, ("a", "b")).append({"a": 2, "b": ""}, {"a": 3, "b": ""})
    assert path.read_text() == 'a,b\n1,"x, y"\n2,\n3,\n'
    empty = tmp_path / "empty.csv"
    empty.touch()
    Table(empty, ("a", "b")).append({"a": 1, "b": 2})
    assert empty.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("text", ["a,b\n1,2\n3", "a,b\n1,2\n3,4", "a,b", "a,c\n1,2\n"])
def test_no_row_is_added_to_what_is_no_whole_table_of_these_columns(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match="expected whole lines below a,b"):
        Table(path, ("a", "b"))
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_refused_before_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"a,b\n\xff\n")
    for path in (tmp_path, tmp_path / "binary.csv"):
        with pytest.raises(BenchmarkError, match="cannot be read"):
            Table(path, ("a", "b"))


def test_rows_that_cannot_be_added_are_a_users_error(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.csv", ("a",))
    (tmp_path / "rows.csv").mkdir()
    with pytest.raises(BenchmarkError, match="2 rows could not be added to"):
        table.append({"a": 1}, {"a": 2})
