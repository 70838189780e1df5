"""A run of two hosts: network namespaces of this machine, each with a name, an address and a disk of its own.

They have in common only the folder that --save and --observe name. Where no namespace can be made, all of this is skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout
from megacpp_mcore.observe.steps import read_steps
from tests.distributed.runs import ROOT, SMALL, Laboratory, launch, read_scalars

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

_ALONE = Layout()
STEPS, SAVED_EVERY, KILLED_AFTER = 60, 4, 6
ENDS_WITHIN_S = 120
"""What a host needs at most to notice the loss of the other, and to end; Megatron's own timeout is ten minutes."""
IN_ITS_NAMESPACES = 'hostname "$1"; mount --bind "$2" disk; mount --bind names /etc/hosts; shift 2; exec "$@"'
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two")


class Hosts:
    """Two hosts, ``host0`` and ``host1``, connected by a virtual cable; in ``folder`` each has the disk ``disk``."""

    def __init__(self, laboratory: Laboratory) -> None:
        self.folder, self.laboratory = laboratory.folder, laboratory
        self.names = [f"mcore{os.getpid()}h{host}" for host in (0, 1)]
        self.running: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        """Make the namespaces; CalledProcessError or OSError where that is not possible."""
        for name in self.names:
            _ip("netns", "add", name)
        ends = [f"v{os.getpid()}h{host}" for host in (0, 1)]
        _ip(
            "link",
            "add",
            ends[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            ends[1],
            "netns",
            self.names[1],
        )
        for host, (name, end) in enumerate(zip(self.names, ends, strict=True)):
            _ip("-n", name, "addr", "add", f"10.77.0.1{host}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", name, "link", "set", device, "up")
            disk = self.folder / f"disk{host}"
            disk.mkdir()
            for file in Path(self.laboratory.data).parent.glob(f"{Path(self.laboratory.data).name}.*"):
                shutil.copy(file, disk)
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
        inside = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "unshare",
            "--uts",
            "--mount",
            "bash",
            "-c",
            IN_ITS_NAMESPACES,
        ]
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(self.laboratory.config)}
        with output.open("wb") as stream:
            self.running.append(
                subprocess.Popen(
                    [*inside, "-", f"host{host}", f"disk{host}", sys.executable, "-W", "ignore", *command],
                    cwd=self.folder, env=os.environ | variables | environment, stdout=stream, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return output

    def words(self, name: str, *extra: str) -> list[str]:
        """The words of a launch that finds its data on the host's own disk, and is recorded in the folder ``name``."""
        words = self.laboratory.training_words(_ALONE, train_iters=STEPS)
        data = f"disk/{Path(self.laboratory.data).name}"
        options = ("launch", "--verbose", "--device", "cpu", "--observe", f"{name} observe", "--")
        return ["-m", "megacpp_mcore", *options, *words, "--data-path", data, "--data-cache-path", "disk/cache", *extra]

    def kill(self, host: int) -> None:
        """End all processes of a host at once, as if its power were cut."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], check=False, capture_output=True, text=True)
        for process in map(int, found.stdout.split()):
            os.kill(process, signal.SIGKILL)

    def statuses(self, timeout: float) -> list[int]:
        """Wait for all that runs."""
        until = time.monotonic() + timeout
        found = [process.wait(max(0.0, until - time.monotonic())) for process in self.running]
        self.running.clear()
        return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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


def torchrun(words: Sequence[str], *more: str, nodes: str = "2") -> list[str]:
    """The words of torchrun on each host, which meet on the first."""
    return [*TORCHRUN, "--nnodes", nodes, "--rdzv-endpoint", "host0:29400", *more, *words]


def test_disks_of_their_own(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    """By torchrun in one task of Slurm per host, then by a task per process; as one host with two processes."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    outputs = [
        hosts.start(host, "by torchrun", torchrun(hosts.words("by torchrun")), SLURM_PROCID=str(host), **slurm)
        for host in (0, 1)
    ]
    assert hosts.statuses(400) == [0, 0], outputs[0].read_text()[-3000:]
    for host in (0, 1):  # what `docs/launch.md` has every task set
        ranks = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        where = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": f"v{os.getpid()}h{host}"}
        hosts.start(host, "by tasks", hosts.words("disk/by tasks"), **ranks, **where, **slurm)
    assert hosts.statuses(400) == [0, 0]

    words = hosts.laboratory.training_words(_ALONE, train_iters=STEPS)
    one = hosts.folder / "one host"
    assert launch(["--observe", str(one), "--", *words], hosts.laboratory.config, 2, timeout=400)[0] == 0
    together = hosts.folder / "by torchrun observe"
    apart = [hosts.folder / f"disk{host}" / "by tasks observe" for host in (0, 1)]
    assert read_scalars(together) == read_scalars(one)
    assert "GLOO_SOCKET_IFNAME = (unset)" in outputs[0].read_text()
    for host in (0, 1):
        assert len(list((hosts.folder / f"disk{host}" / "cache").glob("*/*-sha256.json"))) == 1
    assert cli.main(["report", "show", str(together)]) == 0
    assert re.search(r"status +finished", capsys.readouterr().out)

    # The record of a run without a common folder is whole once its files are in one.
    assert cli.main(["report", "show", str(apart[0])]) == 0
    assert not re.search(r"status +finished", capsys.readouterr().out)
    shutil.copy(apart[1] / "start_1" / "rank_00001.jsonl", apart[0] / "start_1")
    assert cli.main(["report", "show", str(apart[0])]) == 0
    assert re.search(r"status +finished", capsys.readouterr().out)
    assert read_scalars(apart[0]) == read_scalars(one)


def test_a_lost_host_is_named_and_the_other_goes_on_alone(hosts: Hosts) -> None:
    """By torchrun with one host at least: it starts the rest anew, from the last checkpoint."""
    saving = ("--save", "saved", "--load", "saved", "--save-interval", str(SAVED_EVERY))
    command = torchrun(hosts.words("lost", *saving), "--max-restarts", "1", nodes="1:2")
    outputs = [hosts.start(host, "lost", command) for host in (0, 1)]
    record, until = hosts.folder / "lost observe", time.monotonic() + 300
    while not (record.exists() and any(step.step >= KILLED_AFTER for step in read_steps(record))):
        assert {process.poll() for process in hosts.running} == {None}, outputs[0].read_text()
        assert time.monotonic() < until, outputs[0].read_text()
        time.sleep(0.1)
    hosts.kill(1)
    killed, said = time.monotonic(), r"rank 0 of 2 on host0 has lost its connection to rank 1 on host1 \("
    while not re.search(said, outputs[0].read_text()):
        assert time.monotonic() < killed + ENDS_WITHIN_S, outputs[0].read_text()[-3000:]
        time.sleep(0.1)
    assert hosts.statuses(400) == [0, -signal.SIGKILL], outputs[0].read_text()[-3000:]

    words = hosts.laboratory.training_words(_ALONE, train_iters=STEPS)
    one = hosts.folder / "one host"
    assert launch(["--observe", str(one), "--", *words], hosts.laboratory.config, 1, timeout=400)[0] == 0
    expected = read_scalars(one)["lm loss"]
    assert read_scalars(record)["lm loss"] == pytest.approx(expected, rel=1e-5)
    assert len(expected) == STEPS


def test_a_folder_that_hosts_do_not_share_is_refused_for_checkpoints(hosts: Hosts) -> None:
    saving = ("--save", "disk/saved", "--save-interval", "4", "--distributed-timeout-minutes", "1")
    command = torchrun(hosts.words("apart", *saving))
    outputs = [hosts.start(host, "apart", command) for host in (0, 1)]
    assert 0 not in hosts.statuses(400)
    for output in outputs:
        assert "is another folder than on that of rank 1" in output.read_text()
    assert not list(read_steps(hosts.folder / "apart observe"))


def test_another_dataset_on_one_host_is_refused(hosts: Hosts) -> None:
    text = hosts.folder / "other.txt"
    text.write_text("another text\n" * 5000)
    prepare([str(text)], str(hosts.folder / "disk1" / Path(hosts.laboratory.data).name), overwrite=True)
    outputs = [hosts.start(host, "other", torchrun(hosts.words("other"))) for host in (0, 1)]
    assert 0 not in hosts.statuses(400)
    for output in outputs:
        assert re.search(
            r"the datasets, by their manifests' digest: \w+ on rank \d; \w+ on rank \d", output.read_text()
        )
