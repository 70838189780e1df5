"""No process outlives a training: whatever it started holds its output open, which a killed one closes at once."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megacpp_mcore.launch import process
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.steps import read_steps
from tests import forks, tiny_run
from tests.lanes import exhaustive_but
from tests.leftovers import END_S, started


@pytest.mark.slow
@pytest.mark.parametrize("sent", exhaustive_but([signal.SIGKILL, signal.SIGTERM], signal.SIGTERM))
def test_a_training_that_has_saved(data: Path, tmp_path: Path, sent: signal.Signals) -> None:
    saved, output = tmp_path / "saved", tmp_path / "output"
    words = tiny_run.words(data, 1000, "--save", str(saved), "--save-interval", "2")
    launch = ["-m", "megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--", *words]
    options = {"MEGACPP_CONFIG": str(data / "config.yaml")}
    os.mkfifo(output)
    ours = os.open(output, os.O_RDWR)  # without one that could write, it would end before the training opens it
    said = b""
    with output.open("rb", buffering=0) as pipe, forks.start(launch, output, megatron=True, **options) as training:
        while b"successfully saved checkpoint" not in said:
            assert select.select([pipe], [], [], forks.PATIENCE_S)[0], said[-3000:]
            said += pipe.read(1 << 16)
        os.close(ours)
        # A scheduler sends SIGTERM to all processes of a job, the one for the writers' results included.
        (os.killpg if sent == signal.SIGTERM else os.kill)(training.pid, sent)
        while select.select([pipe], [], [], END_S)[0]:
            said += (more := pipe.read(1 << 16))
            if not more:  # nothing holds the output
                break
        else:
            pytest.fail(f"something holds the output after {END_S} s: {said[-3000:]!r}")
        assert training.wait(END_S) == (0 if sent == signal.SIGTERM else -sent), said[-3000:]
    if sent == signal.SIGKILL:
        return
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    receipt = receipts.read(saved / "observe")
    assert (receipt["status"], read_steps(saved / "observe")[-1].step) == ("stopped", last)
    assert receipt["notes"] == ["stopped: exiting program after receiving SIGTERM."]


KINDS = {
    "spawned": "multiprocessing.get_context('spawn').Process(target=wait).start()",
    "forked": "multiprocessing.get_context('fork').Process(target=wait).start()",
    "fork server's": "multiprocessing.get_context('forkserver').Process(target=wait).start()",
    "manager": "results = multiprocessing.get_context('spawn').Manager().Queue()",
}
PROGRAM = """
import multiprocessing, time
from megacpp_mcore.launch import process

def wait():
    print("started", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with process.children_end_with_it():
        {}
        {}
        time.sleep(600)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_what_multiprocessing_starts(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(KINDS[kind], "wait()" if kind == "manager" else ""))
    with started([str(file)], "started") as program:
        program.kill()
        program.communicate(timeout=END_S)


def answer(connection: Connection) -> None:
    while True:
        connection.send(connection.recv())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_sigterm_to_a_job_leaves_those_that_write_to_their_parent(method: str) -> None:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    with process.children_end_with_it():
        child = context.Process(target=answer, args=(theirs,), daemon=True)
        child.start()
    for word in ("started", "goes on"):
        ours.send(word)
        assert ours.poll(forks.PATIENCE_S)
        assert ours.recv() == word
        os.kill(child.pid, signal.SIGTERM)
    child.terminate()
    child.join(forks.PATIENCE_S)
    assert child.exitcode == -signal.SIGKILL
