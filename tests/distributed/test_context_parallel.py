"""Sequences shared by two and four processes: losses and gradients of one process; what a token reaches over the borders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests import stock
from tests.distributed import sharing
from tests.distributed.comparing import differing_tensors

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative, as in test_layouts."""
MANY = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])

Results = Callable[[int], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What so many processes have found, by case."""

    @functools.cache
    def of(ranks: int) -> dict[str, Any]:
        found: dict[str, Any]
        found, *_ = stock.on_ranks("tests.distributed.sharing", ranks, tmp_path_factory.mktemp("sharing"))
        return found

    return of


@MANY
@pytest.mark.parametrize("name", sharing.CASES)
def test_losses_and_every_gradient_are_those_of_one_process(results: Results, name: str, ranks: int) -> None:
    expected, found = results(1)[name], results(ranks)[name]
    assert differing_tensors({"losses": expected["losses"]}, {"losses": found["losses"]}, TOLERANCE) == []
    assert [key for key, value in expected["gradients"].items() if not value.norm() > 0] == []
    assert differing_tensors(expected["gradients"], found["gradients"], TOLERANCE) == []


@MANY
@pytest.mark.parametrize("name", sharing.REACHING)
def test_a_token_at_a_border_reaches_what_comes_after_it_and_nothing_before(
    results: Results, name: str, ranks: int
) -> None:
    """An E layer mixes nothing: there it reaches its own place alone; products of other sizes round otherwise, too."""
    rounding, effect = 1e-5, 1e-2
    chunk, reached = sharing.S // (2 * ranks), results(ranks)[name]["reached"]
    assert len(reached) == 2 * (2 * ranks - 1)
    for place, change in reached.items():
        assert change[:place].max() < rounding
        assert change[place] > effect
        later = change[place + 1 :].split(chunk)
        assert all(part.max() < rounding if name == "E" else part.max() > effect for part in later)
