"""How benchmarks compare losses: a run that is no number agrees with nothing."""

from __future__ import annotations

import math

import pytest

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
