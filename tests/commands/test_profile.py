"""What is asked of a profiler: the window's words, and the command lines for Nsight Systems and Nsight Compute."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore import cpu
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.commands import profile as profile_recipes
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe import run
from megacpp_mcore.observe.profile import Profiler
from megacpp_mcore.settings import Observability, PluginConfig, parse_steps

COMMAND = ["--device", "cuda", "--", "pretrain_gpt.py", "--lr", "1e-3", "--data-path", "a b"]


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


def recipe(tool: str, *command: str, run: str = "run", first: int = 10, last: int = 14, **more: Any) -> list[list[str]]:
    """The commands of a recipe, as a shell would split them."""
    text = profile_recipes.recipe(tool, command, run=run, first=first, last=last, **more)
    return [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]


def test_nsys_waits_for_the_window() -> None:
    folder, command, stats = recipe("nsys", *COMMAND, run="my run", gpu_metrics=True)
    assert folder == ["mkdir", "-p", "my run/profile/10-14"]
    launch = command.index("megacpp-mcore")
    assert command[:2] == ["nsys", "profile"]
    options = {"--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--gpu-metrics-devices=all"}
    assert options | {"--output=my run/profile/10-14/nsys"} <= set(command[:launch])
    window = ["--observe", "my run", "--profile", "10-14", "--profile-tool", "external"]
    assert command[launch:] == ["megacpp-mcore", "launch", *window, *COMMAND]
    assert stats[-1] == "my run/profile/10-14/nsys.nsys-rep"


def test_ncu_reads_the_counters_of_some_kernels_of_a_family() -> None:
    command = recipe("ncu", *COMMAND, family="E")[1]
    assert command[0] == "ncu"
    assert {"--profile-from-start=off", "--nvtx", "--nvtx-include=regex:megacpp::E[.].*/"} <= set(command)
    assert "--launch-count=200" in command  # each is run several times: a whole step would take hours
    (metrics,) = [word for word in command if word.startswith("--metrics=")]
    assert {"sm__pipe_tensor_cycles_active", "sm__cycles_active"} <= {
        word.split(".")[0] for word in metrics[10:].split(",")
    }
    assert command[-len(COMMAND) :] == COMMAND
    assert not any(word.startswith("--nvtx-include") for word in recipe("ncu", *COMMAND)[1])


def ranges_of(family: str) -> str:
    """The filter of ranges that Nsight Compute is given for a family."""
    (found,) = [word for word in recipe("ncu", *COMMAND, family=family)[1] if word.startswith("--nvtx-include=")]
    assert found.endswith("/")
    return found.removeprefix("--nvtx-include=").removesuffix("/")


@pytest.mark.parametrize("find", [re.search, re.fullmatch])  # which of them Nsight Compute does is not documented
@pytest.mark.parametrize(
    ("family", "of_it", "others"),
    [
        ("M", ["M.1", "M.12"], ["MTP.1", "ME.2", "AM.1", "E.1"]),
        ("AE", ["AE.3"], ["A.3", "E.3"]),
        ("MTP", ["MTP.1"], ["M.1"]),
    ],
)
def test_a_family_is_not_one_that_begins_like_it(find: Any, family: str, of_it: list[str], others: list[str]) -> None:
    expression = ranges_of(family).removeprefix("regex:")
    assert all(find(expression, f"megacpp::{name}") for name in of_it)
    assert not any(find(expression, f"megacpp::{name}") for name in others)


def test_a_range_without_a_number_is_named_and_another_family_refused() -> None:
    assert ranges_of("head") == "megacpp::head"
    for family in ("X", "", "E.*", "M/1"):
        with pytest.raises(LaunchError, match=re.escape(f"'{family}'")):
            ranges_of(family)


def words(device: str) -> list[str]:
    impl = "local" if device == "cpu" else "transformer_engine"
    training = Training(device=device, precision="fp32" if device == "cpu" else "bf16", transformer_impl=impl)
    return ["--", *lower(preset("nam56r_tiny"), Layout(), training)]


@pytest.mark.parametrize(
    ("tool", "command", "run", "named"),
    [
        ("nsys", ["--profile", "1-2", *COMMAND], "run", "--profile is among"),
        ("vtune", COMMAND, "run", "'vtune'; expected nsys or ncu"),
        ("nsys", ["--", "--train-iters", "3"], "run", "10-14 .* 3 "),
        ("nsys", ["--"], "run", "--"),
        ("nsys", ["--device", "cuda", "--"], "run", "--"),
        ("nsys", COMMAND, "", "--observe"),
        ("ncu", words("cpu"), "run", "--device cuda"),
        ("ncu", ["--device", "cpu", "--", "--lr", "1"], "run", "--device cuda"),
        ("ncu", ["--device=cpu", *COMMAND[2:]], "run", "--device cuda"),
    ],
)
def test_a_launch_that_would_be_refused_or_has_no_gpu_is_not_printed(
    tool: str, command: list[str], run: str, named: str
) -> None:
    with pytest.raises(LaunchError, match=named):
        recipe(tool, *command, run=run)


def test_what_can_run_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    of_both = ["--distributed-backend", "gloo", "--use-cpu-initialization"]  # a GPU trains with these, too
    for command in (["--", "--train-iters", "12"], words("cuda"), [*words("cuda"), *of_both], [*COMMAND, "--profile"]):
        assert recipe("ncu", *command)[1][-len(command) :] == command
    parser = argparse.ArgumentParser()
    profile_recipes.add_parser(parser.add_subparsers())
    args = parser.parse_args(["profile", "emit", "--tool", "nsys", "--steps", "5-6", "--observe", "run"])
    args.stock_command = ["--lr", "1"]
    assert profile_recipes.run(args) == 0
    assert capsys.readouterr().out == profile_recipes.recipe("nsys", ["--", "--lr", "1"], run="run", first=5, last=6)
