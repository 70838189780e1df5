"""A few steps of nam56r_tiny on the CPU lane, in a process of their own: the corpus, the words for Megatron, the launch."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megacpp_mcore import settings
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, Model, preset, with_overrides
from tests import forks, stock

ROOT = Path(__file__).parents[1]
SCHEDULE = "-FF"
"""Two neighbouring layers with an indexer each: a search has one to give up."""
SEQ_LENGTH = 64
OVERRIDES = {"dsa": {"schedule": SCHEDULE}, "seq_length": SEQ_LENGTH}
TOKENS = 2 * SEQ_LENGTH
"""Of a step."""


def model() -> Model:
    """The model that is trained."""
    return with_overrides(preset("nam56r_tiny"), OVERRIDES, where="overrides")


def make_data(folder: Path, texts: Sequence[Path] = ()) -> Path:
    """Write a small corpus, of ``texts`` or of a few modules of the library, and the file of options to ``folder``."""
    prepare([str(p) for p in texts or [source.path for source in find_stdlib_sources()[:16]]], str(folder / "text"))
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": OVERRIDES}))
    return folder


def words(data: Path, steps: int, *extra: str, layout: Layout | None = None) -> list[str]:
    """Megatron's arguments for ``steps`` steps of two sequences on the corpus in ``data``."""
    from_corpus = ("--data-path", str(data / "text"), "--split", "90,10,0")
    return stock.words(model(), *extra, data=from_corpus, layout=layout, global_batch_size=2, train_iters=steps)


@dataclass(frozen=True)
class Running:
    """A process that was started; what it prints goes to a file, as what outlives a killed one would hold a pipe open."""

    process: forks.Program | subprocess.Popen[bytes]
    log: Path

    def finish(self, status: int = 0) -> str:
        """Wait for the end, which has to be with ``status``, and return what was printed."""
        try:
            exit_status = self.process.wait(timeout=forks.PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            exit_status = self.process.wait()
        output = self.log.read_text(errors="replace")
        self.log.unlink()
        if exit_status != status:
            raise AssertionError(f"the process ended with status {exit_status}, expected {status}:\n{output[-3000:]}")
        return output


def start(program: Sequence[str], arguments: Sequence[str], data: Path | None, fate: str = "", **more: str) -> Running:
    """Start ``program`` with Megatron's ``arguments``, the options of the folder ``data``, and a ``fate`` for real_run."""
    ours = {"FATE": fate, settings.VARIABLE: "" if data is None else str(data / "config.yaml")}
    with tempfile.NamedTemporaryFile(suffix=".log", delete=False) as log:
        output = Path(log.name)
    return Running(forks.start(["-m", *program, *arguments], output, megatron=True, **ours | more), output)
