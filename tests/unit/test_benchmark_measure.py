"""How benchmarks measure: which calls count, what the processor is called; losses that are no numbers agree with none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.bench import measure
from megacpp_mcore.bench.measure import worst_difference


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
