"""How benchmarks measure: which calls count, what the processor is called; losses that are no numbers agree with none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.bench import measure
from megacpp_mcore.bench.measure import Table, worst_difference
from megacpp_mcore.errors import BenchmarkError


@pytest.mark.parametrize(("relative", "worst"), [(True, 0.5), (False, 2.0)])
def test_the_largest_difference_of_a_step(relative: bool, worst: float) -> None:
    assert worst_difference([1.0, 4.0, 2.0], [1.5, 6.0, 2.0], relative=relative) == worst


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_is_infinitely_far(place: int, value: float) -> None:
    broken = [1.0, 2.0, 3.0]
    broken[place] = value
    assert worst_difference([1.0, 2.0, 3.0], broken, relative=True) == math.inf
    assert worst_difference(broken, broken, relative=False) == math.inf


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        worst_difference([1.0], [1.0, 2.0], relative=True)


@pytest.mark.parametrize(
    ("seconds", "timed", "median"),
    [(1.0, ["a", "b", "c", "a", "b"], 5.0), (0.01, ["a", "b", "c"], 5.0), (0.016, ["a", "b", "c", "a"], 4.0)],
    ids=["repeats", "fewest", "seconds"],
)
def test_the_median_of_calls_that_go_round_the_sets_after_the_warm_up(
    seconds: float, timed: list[str], median: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm: list[str] = []
    called: list[str] = []
    times = iter([9.0, 1.0, 5.0, 3.0, 100.0])

    def milliseconds(run: Any, inputs: str, device: str) -> float:
        called.append(inputs)
        assert len(warm) == 4  # the warm-up is over
        return next(times)

    monkeypatch.setattr(measure, "_milliseconds", milliseconds)
    found = measure.median_ms(warm.append, ["a", "b", "c"], "cpu", warmup=4, repeats=5, seconds=seconds)
    assert found == (median, len(timed))
    assert called == timed
    assert warm == ["a", "b", "c", "a"]


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


@pytest.mark.parametrize("text", ["a,b\n1,2\n3", "a,b\n1,2\n3,4", "a,b"])
def test_no_row_is_glued_to_a_line_that_does_not_end(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match="ends within a line") as refused:
        Table(path, ("a", "b"))
    assert repr(text.splitlines()[-1]) in str(refused.value)
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_refused_before_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a,b\n")
    (tmp_path / "binary.csv").write_bytes(b"a,b\n\xff\n")
    for path in (Path("/proc/rows.csv"), tmp_path, tmp_path / "file" / "rows.csv", tmp_path / "binary.csv"):
        with pytest.raises(BenchmarkError, match="is no file that rows can be added to"):
            Table(path, ("a", "b"))


def test_rows_that_cannot_be_added_are_a_users_error(tmp_path: Path) -> None:
    table = Table(tmp_path / "rows.csv", ("a",))
    (tmp_path / "rows.csv").mkdir()
    with pytest.raises(BenchmarkError, match="2 rows could not be added to"):
        table.append({"a": 1}, {"a": 2})
