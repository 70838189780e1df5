"""What is asked of a profiler: the window's words, and whether there is anything for it here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore import cpu
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.observe import run
from megacpp_mcore.observe.profile import Profiler
from megacpp_mcore.settings import Observability, PluginConfig, parse_steps


def test_a_window_is_its_first_and_last_step() -> None:
    assert parse_steps("10-14") == (10, 14)
    assert parse_steps(" 3-3 ") == (3, 3)
    for text in ("", "10", "14-10", "0-4", "a-b", "1-2-3", "-1-4"):
        with pytest.raises(LaunchError, match=f"'{text}'"):
            parse_steps(text)


@pytest.fixture(params=["in the lane", "without a GPU", "on a GPU"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a run trains; the lane answers that there is a GPU."""
    with contextlib.ExitStack() as stack:
        if request.param == "in the lane":
            stack.callback(cpu.install().remove)
        else:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param == "on a GPU")
        yield request.param


def test_a_profiler_around_a_run_on_a_cpu_is_refused_before_it_trains(device: str, tmp_path: Path) -> None:
    def choose(**options: Any) -> Any:
        return run.choose([], observe=str(tmp_path), **options)

    settings = PluginConfig(
        Path("file"), "tiny", preset("nam56r_tiny"), observability=Observability(profile="2-3", profile_tool="external")
    )
    made: list[Callable[[], Any]] = [
        lambda: choose(profile="2-3", profile_tool="external").details.profile_tool,
        lambda: choose(settings=settings).details.profile_tool,
        lambda: Profiler(tmp_path, 0, 2, 3, tool="external") and "external",
    ]
    for make in made:
        if device == "on a GPU":
            assert make() == "external"
        else:
            with pytest.raises(LaunchError, match="--profile-tool torch"):
                make()
    assert choose(profile="2-3").details.profile_tool == "torch"
    assert choose(profile_tool="external").details.profile is None  # of no steps
    with pytest.raises(LaunchError, match="'perf'; expected torch or external"):
        Profiler(tmp_path, 0, 1, 2, tool="perf")
