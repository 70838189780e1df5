"""Recorded steps: reading a run that grows, and comparing two recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe.events import Start
from megacpp_mcore.observe.steps import kept, read_steps
from tests.observe.recorded import a_step, at, stepped, with_loss, write_start


def test_the_steps_of_a_run_are_those_that_its_last_ranks_wrote(tmp_path: Path) -> None:
    """Two starts, of which the second had fewer processes; read while it grows, and torn."""
    assert read_steps(tmp_path) == []
    for rank in (0, 1):
        steps = [stepped(number, number) for number in (1, 2)]
        write_start(tmp_path, 1, rank, *(map(with_loss, steps) if rank else steps), at(3), world_size=2)
    assert [one.step for one in read_steps(tmp_path)] == [1, 2]
    path = write_start(tmp_path, 2, 0, with_loss(stepped(12, 2, resumed_at=1), 1.5), began=10)
    with path.open("a") as stream:
        stream.write('{"at": 3, "losses"')
    *_, last = found = read_steps(tmp_path)
    assert [one.step for one in found] == [1, 2, 2]
    assert (last.resumed_at, last.losses) == (1, {"lm loss": 1.5})
    with pytest.raises(DataError, match=str(tmp_path / "nowhere")):
        read_steps(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("recorded", "left"),
    [
        ([], []),
        ([(0, [1, 2, 3])], [(1, 0), (2, 0), (3, 0)]),
        # gone on from 2: 3, 4 and 5 are undone, of which it has only done the first again
        ([(0, [1, 2, 3, 4, 5]), (2, [3])], [(1, 0), (2, 0), (3, 2)]),
        # twice from the same checkpoint, and then from one before that
        ([(0, [1, 2]), (2, [3, 4]), (2, [3])], [(1, 0), (2, 0), (3, 2)]),
        ([(0, [1, 2]), (2, [3, 4]), (1, [2, 3])], [(1, 0), (2, 1), (3, 1)]),
        # anew
        ([(0, [1, 2, 3]), (0, [1])], [(1, 0)]),
        # steps that the log interval left out
        ([(0, [1, 10, 20]), (10, [11])], [(1, 0), (10, 0), (11, 10)]),
        ([(0, [1, 10, 15]), (10, [20])], [(1, 0), (10, 0), (20, 10)]),
    ],
)
def test_what_a_restart_rolled_back_is_gone(recorded: list[tuple[int, list[int]]], left: list[tuple[int, int]]) -> None:
    starts = [
        Start(1, 0, 1, 0, resumed_at=resumed_at, steps=[a_step(number, resumed_at=resumed_at) for number in numbers])
        for resumed_at, numbers in recorded
    ]
    assert [(one.step, one.resumed_at) for one in kept(starts)] == left
