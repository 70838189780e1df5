"""A run of two hosts: network namespaces of this machine, each with a name, an address and a disk of its own.

They have in common only the folder that --save and --observe name. Where no namespace can be made, these tests are skipped, but
not that of two tasks, which have no more than disks of their own. What starts them is read from the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.launch.plan import OF_RANKS
from megacpp_mcore.model import Layout
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.distributed.runs import ROOT, SMALL, Laboratory, launch, read_scalars

pytestmark = pytest.mark.slow
exhaustive = pytest.mark.exhaustive

_ALONE = Layout()
STEPS, SAVED_EVERY, KILLED_AFTER = 60, 6, 7
ENDS_WITHIN_S = 120
"""What a host needs at most to notice the loss of the other, and to end; Megatron's own timeout is ten minutes."""
IN_ITS_NAMESPACES = 'hostname "$1"; mount --bind "$2" disk; mount --bind names /etc/hosts; shift 2; exec "$@"'
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
MEETING, NUMBERED = "torchrun --nnodes 2 --nproc", "torchrun --nnodes 2 --node-rank"
STAND_INS = {"srun": 'shift 2; exec "$@"', "torchrun": "printf '%s\\n' \"$@\"", "megacpp-mcore": "exec env"}
SAVING = ("--save-interval", str(SAVED_EVERY))


class Hosts:
    """Two hosts, ``host0`` and ``host1``, connected by a virtual cable; in ``folder`` each has the disk ``disk``."""

    def __init__(self, laboratory: Laboratory) -> None:
        self.folder, self.laboratory = laboratory.folder, laboratory
        self.names = [f"mcore{os.getpid()}h{host}" for host in (0, 1)]
        self.running: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        """Make the namespaces; CalledProcessError or OSError where that is not possible."""
        for name in self.names:
            _ip(f"netns add {name}")
        ends = [f"v{os.getpid()}h{host}" for host in (0, 1)]
        peer = f"peer name {ends[1]} netns {self.names[1]}"
        _ip(f"link add {ends[0]} netns {self.names[0]} type veth {peer}")
        for host, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            _ip(f"-n {name} addr add 10.77.0.1{host}/24 dev {end}")
            for device in (end, "lo"):
                _ip(f"-n {name} link set {device} up")
            fill_disk(self.laboratory, self.folder / f"disk{host}")
        (self.folder / "disk").mkdir()
        (self.folder / "names").write_text("127.0.0.1 localhost\n10.77.0.10 host0\n10.77.0.11 host1\n")

    def close(self) -> None:
        """End what runs there, and remove the namespaces."""
        for host, name in enumerate(self.names):
            self.kill(host)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, host: int, name: str, command: Sequence[str], **environment: str) -> Path:
        """Start a command on a host; returns where its output goes."""
        output = self.folder / f"{name} output {host}"
        inside = f"ip netns exec {self.names[host]} unshare --uts --mount bash -c".split()
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(self.laboratory.config)}
        with output.open("wb") as stream:
            self.running.append(
                subprocess.Popen(
                    [*inside, IN_ITS_NAMESPACES, "-", f"host{host}", f"disk{host}", sys.executable, "-W", "ignore", *command],
                    cwd=self.folder, env=os.environ | variables | environment, stdout=stream, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return output

    def words(self, name: str, *extra: str) -> list[str]:
        """The words of a launch on these hosts, which is recorded in the folder ``name``."""
        return words_of(self.laboratory, name, STEPS, *extra)

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as if its power were cut."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], check=False, capture_output=True, text=True)
        for process in map(int, found.stdout.split()):
            os.kill(process, signal.SIGKILL)

    def statuses(self, timeout: float) -> list[int]:
        until = time.monotonic() + timeout
        found = [process.wait(max(0.0, until - time.monotonic())) for process in self.running]
        self.running.clear()
        return found


def fill_disk(laboratory: Laboratory, disk: Path) -> None:
    disk.mkdir(parents=True)
    for file in Path(laboratory.data).parent.glob(f"{Path(laboratory.data).name}.*"):
        shutil.copy(file, disk)


def words_of(laboratory: Laboratory, name: str, steps: int, *extra: str) -> list[str]:
    """The words of a launch that finds its data on the host's own disk, and is recorded in the folder ``name``."""
    words = laboratory.training_words(_ALONE, train_iters=steps)
    own = ("--data-path", f"disk/{Path(laboratory.data).name}", "--data-cache-path", "disk/cache")
    options = ("launch", "--verbose", "--device", "cpu", "--observe", f"{name} observe", "--")
    return ["-m", "megacpp_mcore", *options, *words, *own, *extra]


def documented(start: str, task: int, folder: Path) -> list[str]:
    """What the command on `docs/launch.md` that begins so gives a task of Slurm: torchrun's words, a launch's variables."""
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"^{start}.*?[^\\]$", page, re.DOTALL | re.MULTILINE)
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    of_task = SLURM | {"SLURM_PROCID": str(task), "SLURM_NODEID": str(task), "PATH": f"{folder}:{os.environ['PATH']}"}
    words = ["bash", "-c", command.replace("-per-node 8", "-per-node 1")]
    return subprocess.run(words, env=of_task, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def ranks_of(task: int, folder: Path, **changed: str) -> dict[str, str]:
    """What a task of the page's ``srun`` sets for its launch."""
    given = dict(line.split("=", 1) for line in documented("srun ", task, folder))
    return {name: given[name] for name in OF_RANKS & given.keys()} | changed


def wait_for_steps(record: Path, running: Sequence[forks.Program | subprocess.Popen[bytes]], output: Path) -> None:
    """Wait until so many steps are recorded that a host may be lost."""

    def there() -> bool:
        assert {process.poll() for process in running} == {None}, output.read_text()[-3000:]
        return record.exists() and any(step.step >= KILLED_AFTER for step in read_steps(record))

    forks.wait_until(there, output.read_text)


def check_losses(record: Path, steps: int) -> None:
    """Fail unless every step is there, and those since the last checkpoint, which both hosts and then one trained, agree."""
    losses: dict[int, list[float]] = {}
    for step in read_steps(record):
        losses.setdefault(step.step, []).append(step.values()["lm loss"])
    assert sorted(losses) == [*range(1, steps + 1)]
    twice = [values for values in losses.values() if len(values) > 1]
    assert twice
    assert all(values == pytest.approx(values[:1] * len(values), rel=1e-5) for values in twice)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(Laboratory(tmp_path, overrides=SMALL))
    try:
        try:
            made.make()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)!r}")
        yield made
    finally:
        made.close()


def torchrun(hosts: Hosts, words: Sequence[str], *more: str, start: str = MEETING) -> list[list[str]]:
    """The words of the page's torchrun on each host."""
    own = [documented(start, host, hosts.folder) for host in (0, 1)]
    return [["-m", "torch.distributed.run", *one[: one.index("-m")], *more, *words] for one in own]


@exhaustive
def test_disks_of_their_own(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    """By torchrun in one task of Slurm per host, then by a task per process; as one host with two processes."""
    outputs = [
        hosts.start(host, "by torchrun", command, SLURM_PROCID=str(host), **SLURM)
        for host, command in enumerate(torchrun(hosts, hosts.words("by torchrun")))
    ]
    assert hosts.statuses(400) == [0, 0], outputs[0].read_text()[-3000:]
    for host in (0, 1):
        ranks = ranks_of(host, hosts.folder, GLOO_SOCKET_IFNAME=f"v{os.getpid()}h{host}")
        hosts.start(host, "by tasks", hosts.words("disk/by tasks"), **ranks)
    assert hosts.statuses(400) == [0, 0]

    words = hosts.laboratory.training_words(_ALONE, train_iters=STEPS)
    one = hosts.folder / "one host"
    assert launch(["--observe", str(one), "--", *words], hosts.laboratory.config, 2)[0] == 0
    together = hosts.folder / "by torchrun observe"
    apart = [hosts.folder / f"disk{host}" / "by tasks observe" for host in (0, 1)]
    assert read_scalars(together) == read_scalars(one)
    assert "GLOO_SOCKET_IFNAME = (unset)" in outputs[0].read_text()
    for host in (0, 1):
        assert len(list((hosts.folder / f"disk{host}" / "cache").glob("*/*-sha256.json"))) == 1
    assert cli.main(["report", "show", str(together)]) == 0
    assert re.search(r"status +finished", capsys.readouterr().out)
    receipt = json.loads((together / "receipt.json").read_text())
    assert (receipt["parallelism"]["hosts"], receipt["ranks"]["found"]) == (2, [0, 1])

    # The record of a run without a common folder is whole once its files are in one.
    assert cli.main(["report", "show", str(apart[0])]) == 0
    assert not re.search(r"status +finished", capsys.readouterr().out)
    shutil.copy(apart[1] / "start_1" / "rank_00001.jsonl", apart[0] / "start_1")
    assert cli.main(["report", "show", str(apart[0])]) == 0
    assert re.search(r"status +finished", capsys.readouterr().out)
    assert read_scalars(apart[0]) == read_scalars(one)


def test_a_lost_task_is_named_and_fewer_go_on(tmp_path: Path) -> None:
    """Two tasks of srun, as the page starts them, with disks and caches of their own; then one, with the same words."""
    sizes = {"micro_batch_size": 1, "global_batch_size": 2}
    laboratory, record = Laboratory(tmp_path, overrides=SMALL, **sizes), tmp_path / "lost observe"
    saved, steps = str(tmp_path / "saved"), 20
    words = words_of(laboratory, str(tmp_path / "lost"), steps, "--save", saved, "--load", saved, *SAVING)
    port = forks.held_port()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
    ranks, folders = [ranks_of(task, tmp_path, **where) for task in (0, 1)], [tmp_path / "host0", tmp_path / "host1"]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(laboratory.config)}

    def started(folder: Path, own: dict[str, str]) -> forks.Program | subprocess.Popen[bytes]:
        env = os.environ | variables | {"TRITON_CACHE_DIR": str(folder / "disk" / "triton")} | own
        return forks.start(words, folder / "output", cwd=folder, env=env, megatron=True)

    for folder in folders:
        fill_disk(laboratory, folder / "disk")
    output = folders[0] / "output"
    with started(folders[0], ranks[0]) as first, started(folders[1], ranks[1]) as second:
        wait_for_steps(record, (first, second), output)
        second.kill()
        assert first.wait(ENDS_WITHIN_S) == 2, output.read_text()[-3000:]
    port.close()
    own = re.escape(socket.gethostname())
    assert re.search(rf"error: rank 0 of 2 on {own} has lost its connection to rank 1 on {own} \(", output.read_text())
    assert [len(list(folder.glob("disk/cache/*/*-sha256.json"))) for folder in folders] == [1, 1]
    with started(folders[0], {}) as rest:
        assert rest.wait(forks.PATIENCE_S) == 0, output.read_text()[-3000:]
    assert "successfully loaded checkpoint" in output.read_text()
    check_losses(record, steps)


@exhaustive
def test_a_lost_host_is_named_and_the_other_goes_on_alone(hosts: Hosts) -> None:
    """By torchrun with one host at least: it starts the rest anew, from the last checkpoint."""
    saving = ("--save", "saved", "--load", "saved", *SAVING)
    commands = torchrun(hosts, hosts.words("lost", *saving), "--nnodes", "1:2", "--max-restarts", "1")
    outputs = [hosts.start(host, "lost", command) for host, command in enumerate(commands)]
    record = hosts.folder / "lost observe"
    wait_for_steps(record, hosts.running, outputs[0])
    hosts.kill(1)
    said = r"rank 0 of 2 on host0 has lost its connection to rank 1 on host1 \("
    forks.wait_until(lambda: re.search(said, outputs[0].read_text()), outputs[0].read_text, within_s=ENDS_WITHIN_S)
    assert hosts.statuses(400) == [0, -signal.SIGKILL], outputs[0].read_text()[-3000:]
    check_losses(record, STEPS)


@exhaustive
def test_a_host_that_cannot_be_reached_is_not_waited_for_without_end(hosts: Hosts) -> None:
    """Its cable is pulled: no connection is closed."""
    words = hosts.words("cut", "--distributed-timeout-minutes", "1")
    ends = [f"v{os.getpid()}h{host}" for host in (0, 1)]
    ranks = [ranks_of(host, hosts.folder, GLOO_SOCKET_IFNAME=end) for host, end in enumerate(ends)]
    outputs = [hosts.start(host, "cut", words, **variables) for host, variables in enumerate(ranks)]
    wait_for_steps(hosts.folder / "cut observe", hosts.running, outputs[0])
    _ip(f"-n {hosts.names[1]} link set {ends[1]} down")
    assert hosts.statuses(60 + ENDS_WITHIN_S) == [2, 2], outputs[0].read_text()[-3000:]
    for host, output in enumerate(outputs):
        assert f"another rank did not answer rank {host} of 2 on host{host} in 60 s" in output.read_text()


@exhaustive
def test_a_damaged_copy_of_the_data_on_one_host_ends_both(hosts: Hosts) -> None:
    with (hosts.folder / "disk1" / f"{Path(hosts.laboratory.data).name}.bin").open("r+b") as copy:
        copy.write(b"\1\1\1\1")
    commands = torchrun(hosts, hosts.words("damaged"), start=NUMBERED)
    outputs = [hosts.start(host, "damaged", command) for host, command in enumerate(commands)]
    assert 0 not in hosts.statuses(ENDS_WITHIN_S)
    texts = [output.read_text() for output in outputs]
    assert all(".bin: found SHA-256 " in text for text in texts)
    assert re.search(r"error: rank \d of 2 on host1 ends the run: disk/", texts[0]), texts[0][-3000:]
