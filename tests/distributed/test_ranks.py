"""A run whose ranks differ is refused on all of them, and is told what differs; what a rank has of its own is not compared."""

from __future__ import annotations

import re
import socket
import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import preset
from megacpp_mcore.policy import ranks
from tests import forks, stock, tiny_run
from tests.distributed import differing
from tests.errors import raises


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks raised, by the way in which the second differed."""
    return stock.on_ranks("tests.distributed.differing", 2, tmp_path_factory.mktemp("differing"))


@pytest.mark.parametrize("way", differing.WAYS)
def test_a_difference_is_refused_on_every_rank_with_both_values(errors: list[dict[str, str]], way: str) -> None:
    first, second = (of_rank[way] for of_rank in errors)
    assert first == second
    (line,) = re.findall(rf"^  {re.escape(way)}: (.*)$", first, re.MULTILINE)
    values = re.fullmatch(r"(.+) on rank 0; (.+) on rank 1", line)
    assert values
    assert values[1] != values[2]


def test_an_error_of_one_rank_reaches_all(errors: list[dict[str, str]]) -> None:
    for of_rank in errors:
        assert of_rank[differing.FAILS].partition("environment:\n")[2] == (
            "  rank 1 cannot be compared: PermissionError(13, 'Permission denied')"
        )


def test_what_is_a_rank_s_own_is_not_compared(errors: list[dict[str, str]]) -> None:
    assert [set(differing.SAME) & set(of_rank) for of_rank in errors] == [set(), set()]


def test_under_bridge_the_command_line_is_compared_without_what_is_a_rank_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", None)

    def told(words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["run", *words.split()])
        return ranks.collect(None)["command line"]

    own = "dataset.path_to_cache={0} logger.tensorboard_dir=/{0} logger.wandb_exp_name={0} --node-rank {0} --local_rank={0}"
    assert told(f"{own.format(1)} optimizer.lr=0.1") == told(f"{own.format(2)} optimizer.lr=0.1")
    assert told("optimizer.lr=0.1") != told("optimizer.lr=0.2")


def test_files_that_arguments_name_and_megatrons_own_are_compared_by_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named = stock.parse([*stock.words(preset("nam56r_tiny")), "--data-args-path", str(tmp_path / "list")])
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", named)
    found = []
    for text in ("0.5 a 0.5 b", "0.9 a 0.1 b"):
        (tmp_path / "list").write_text(text)
        found.append(ranks.collect(None))
    assert [name for name in found[0] if found[0][name] != found[1][name]] == ["the content of --data-args-path"]
    assert re.fullmatch(r"digest [0-9a-f]{16} [0-9a-f]{16}", found[0]["the code of Megatron"])
    (tmp_path / "x.py").write_text("a = 1")
    digests = [ranks._digest(tmp_path)]
    ranks._digest.cache_clear()  # of a process's own code, which does not change
    (tmp_path / "x.py").write_text("a = 2")
    assert ranks._digest(tmp_path) != digests[0]


# Two tasks that meet, and check what is theirs; the second is changed.
MEETING = """
import os, sys
from megacpp_mcore.errors import DataError, MegacppError
from megacpp_mcore.policy import ranks
def check(): pass
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
try:
    with ranks.met([]) as checked, checked():
        check()
except MegacppError as error:
    sys.exit(f"{os.getpid()} {type(error).__name__}: {error}")"""
CHANGES = {
    "sizes": 'os.environ["WORLD_SIZE"] = "3"',
    "numbers": 'os.environ["RANK"] = "0"',
    "checks": 'def check(): raise DataError("a.bin is damaged")',
    "nothing": "",
}


@pytest.mark.parametrize("change", CHANGES)
def test_tasks_that_cannot_train_together_end_together(tmp_path: Path, change: str) -> None:
    outputs = [tmp_path / str(task) for task in range(2)]
    programs = forks.start_ranks(["-c", MEETING, CHANGES[change]], outputs)
    assert [program.wait(forks.PATIENCE_S) for program in programs] == [int(change != "nothing")] * 2
    first, second = (output.read_text() for output in outputs)
    own = re.escape(socket.gethostname())
    if change == "sizes":
        assert re.search(rf"differ in WORLD_SIZE: (2 on {own}, 3|3 on {own}, 2) on {own};", first)
    elif change == "numbers":
        processes = sorted(output.partition(" ")[0] for output in (first, second))
        assert sorted(re.findall(rf"process (\d+) on {own}", first)) == processes
        assert "RANK=0" in first
    elif change == "checks":
        assert first.endswith(f" LaunchError: rank 1 of 2 on {socket.gethostname()} ends the run: a.bin is damaged\n")
        assert second.endswith(" DataError: a.bin is damaged\n")


# A training of which one rank is started in another way.
SECOND = """
import os, runpy, sys
script, words = sys.argv[1], sys.argv[2:]
if os.environ["RANK"] == "1":
    words += ["--weight-decay", "0.25"]
    os.environ["MEGACPP_CONFIG"] += ".of rank 1"
sys.argv = [script, *words]
"""
LAUNCHED = SECOND + "from megacpp_mcore.commands.cli import main\nsys.exit(main([*script.split(), *words]))"
BARE = SECOND + (
    "from megacpp_mcore import cpu, patches\n"
    "cpu.install()\n"
    "patches.apply(['dataset-helpers'])\n"
    "sys.path.insert(0, os.path.dirname(script))\n"
    "runpy.run_path(script, run_name='__main__')"
)


def refused(code: str, script: str, data: Path, tmp_path: Path) -> str:
    file, of_second = tmp_path / "config.yaml", tmp_path / "config.yaml.of rank 1"
    file.write_text((data / file.name).read_text())
    of_second.write_text(f"{file.read_text()}recompute: [m]\n")
    program = ["-c", code, script, *tiny_run.words(data, 2)]
    status, output = forks.run_ranks(program, 2, megatron=code is LAUNCHED, MEGACPP_CONFIG=str(file))
    assert status != 0
    assert not re.search(r"iteration +1/", output), output[-3000:]
    for difference in ("--weight-decay: 0.1 on rank 0; 0.25", "MEGACPP_CONFIG recompute.m: False on rank 0; True"):
        # Once or twice: the rank that ends first ends the other.
        assert f"  {difference} on rank 1\n" in output, output[-3000:]
    return output


@pytest.mark.slow
def test_the_launcher_refuses_before_process_groups_are_made(data: Path, tmp_path: Path) -> None:
    """Groups of other sizes would wait for each other."""
    output = refused(LAUNCHED, "launch --device cpu --no-observe --", data, tmp_path)
    assert "initialized tensor model parallel" not in output


# A launch whose third process was told another port; it waits for seconds instead of minutes, from when all are there.
MISSING = """
import datetime, os, pathlib, sys, time
if os.environ["RANK"] == "2":
    os.environ["MASTER_PORT"] = "9"
from megacpp_mcore.policy import ranks
ranks.MINUTE = datetime.timedelta(seconds=2)
here, met = pathlib.Path(sys.argv.pop(1)), ranks.met
def met_together(arguments):
    (here / os.environ["RANK"]).touch()
    while len(list(here.iterdir())) < 3:
        time.sleep(0.01)
    return met(arguments)
ranks.met = met_together
from megacpp_mcore.commands.cli import main
sys.exit(main(["launch", "--device", "cpu", "--no-observe", "--", *sys.argv[1:]]))"""


@pytest.mark.slow
def test_processes_that_have_not_come_are_named_by_those_that_have(tmp_path: Path) -> None:
    words = stock.words(preset("nam56r_tiny"), "--distributed-timeout-minutes", "1", processes=3, global_batch_size=3)
    outputs = [tmp_path / str(rank) for rank in range(3)]
    (together := tmp_path / "together").mkdir()
    programs = forks.start_ranks(["-c", MISSING, str(together), *words], outputs, megatron=True)
    assert [program.wait(forks.PATIENCE_S) for program in programs] == [2, 2, 2]
    first, second, third = (output.read_text() for output in outputs)
    host = re.escape(socket.gethostname())
    assert re.search(rf"error: rank 2 of 3 did not reach localhost:\d+ .*, where ranks 0, 1 on {host} wait; start", first)
    assert re.search(r"error: rank (2 of 3 did not reach|0 of 3 at) localhost:\d+ ", second)
    assert re.search(rf"error: rank 2 of 3 on {host} found no rank 0 at localhost:9 .* WORLD_SIZE=3 .*`nc -z", third)
    assert all("Traceback" not in said for said in (first, second, third))


RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "80"}


def test_a_port_that_rank_0_cannot_listen_at_is_not_a_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    denied = torch.distributed.DistNetworkError("The server socket has failed to bind to [::]:80 (errno: 13, EACCES)")
    with (
        mock.patch("torch.distributed.TCPStore", side_effect=denied),
        raises(LaunchError, "rank 0 of 2", "localhost:80", "EACCES", "MASTER_PORT above 1023"),
        ranks.met([]),
    ):
        pytest.fail("nobody was met")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_another_program_at_the_port_is_not_waited_for_without_end(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never answers."""
    monkeypatch.setattr(ranks, "_REPLY", timedelta(seconds=0.1))
    monkeypatch.setattr(ranks, "MINUTE", timedelta(seconds=0.01))
    with socket.create_server(("localhost", 0)) as other:
        for name, value in (RANK_0 | {"RANK": rank, "MASTER_PORT": (port := str(other.getsockname()[1]))}).items():
            monkeypatch.setenv(name, value)
        in_use = pytest.raises(torch.distributed.DistNetworkError, match="EADDRINUSE")
        with in_use if rank == "0" else raises(LaunchError, "rank 1 of 2", f"localhost:{port}"), ranks.met([]):
            pytest.fail("nobody was met")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_host_without_an_address_is_named_while_it_is_waited_for(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "no.invalid", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def waits(*_: object, **__: object) -> None:
        assert f"rank {rank} of 2 on {socket.gethostname()} found no address of MASTER_ADDR" in capsys.readouterr().out
        raise torch.distributed.DistNetworkError("The client socket has timed out after 600000ms")

    with (
        mock.patch("torch.distributed.TCPStore", waits),
        raises(LaunchError, f"rank {rank} of 2", "'no.invalid' in 0:10:00", "WORLD_SIZE=2"),
        ranks.met([]),
    ):
        pytest.fail("nobody was met")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_spec_refuses_under_a_stock_script(data: Path, tmp_path: Path, megatron_lm: Path) -> None:
    refused(BARE, str(megatron_lm / "pretrain_gpt.py"), data, tmp_path)
