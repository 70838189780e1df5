"""Kernels that a run has recorded are compiled ahead, into the cache in which a launch finds them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from megacpp_mcore.commands import cli, kernels
from megacpp_mcore.errors import DataError
from megacpp_mcore.launch import process
from megacpp_mcore.ops import builds, triton_launch
from tests import forks
from tests.errors import raises
from tests.ops.launching import Driver

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not triton_launch.DIRECT, reason="the driver of Triton 3.6"),
]


def launched(cache: Path, *record: Path) -> list[bool]:
    """For each kernel that a process launches, whether the cache had it."""
    done = forks.run(["-m", "tests.ops.launching", *map(str, record)], timeout=120, TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-3000:]
    cache_hits: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return cache_hits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two starts, of which the second was killed after one kernel."""
    folder = tmp_path_factory.mktemp("run")
    complete, killed = (folder / f"start_{number}" / builds.FILE for number in (1, 2))
    complete.parent.mkdir()
    killed.parent.mkdir()
    assert launched(folder / "cache", complete) == [False, False, False]
    killed.write_text(complete.read_text()[:-9])
    return folder


def test_a_launch_finds_what_was_built(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(builds.lines(run)) == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = forks.run(["-m", "megacpp_mcore", "kernels", "build", str(run), "--jobs", "2"], timeout=120)
    assert done.stdout.startswith("2 kernels compiled, 0 were in the cache, 0 failed; ")
    launchers = {*tmp_path.glob("*/__triton_launcher*.so")}
    assert len(launchers) == 2
    with builds._linked():
        # Each by itself brings libcuda, here the empty one.
        libraries = [f"{os.environ['TRITON_LIBCUDA_PATH']}/libcuda.so.1", *map(str, launchers)]
        done = forks.run(["-c", "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]", *libraries], timeout=60)
        assert done.returncode == 0, done.stderr[-3000:]
        assert launched(tmp_path, tmp_path / "gone" / builds.FILE) == [True, True, False]  # the record cannot be written
    compiled = {*tmp_path.glob("*/__triton_launcher*.so")}
    assert launchers < compiled
    assert len(compiled) == 3  # no other for the two kernels


def test_without_a_c_compiler_only_launchers_are_missing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert kernels.run(argparse.Namespace(folder=str(run), jobs=1)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("2 kernels compiled, 0 were in the cache, 0 failed; ")
    assert "2 of them will still run the C compiler" in printed
    assert str(tmp_path / "none") in printed


def test_a_triton_without_the_method_that_describes_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton.JITFunction, "_call_hook")
    with builds.recorded(tmp_path / builds.FILE):
        assert triton.knobs.runtime.jit_post_compile_hook is None


def test_what_other_hooks_raise_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that was there before gets its kernels, and what it raises passes, as without a recording."""

    def described(function: object, hook: Callable[[], None]) -> None:
        hook()

    def refused() -> None:
        raise TypeError("by the hook")

    monkeypatch.setattr(triton.JITFunction, "_call_hook", described)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", refused)
    with builds.recorded(tmp_path / builds.FILE), pytest.raises(TypeError, match="by the hook"):
        triton.JITFunction._call_hook(None, triton.knobs.runtime.jit_post_compile_hook)


def test_the_start_with_the_most_of_what_is_known_is_taken(run: Path, tmp_path: Path) -> None:
    """Not one of an earlier Triton with more lines: those are refused only if there are no others."""
    own = builds.lines(run)
    others = [line.replace(triton.__version__, "3.5.0", 1) for line in [*own, own[0].replace("90", "91")]]
    for number, written in enumerate([others, own[:1], own], 1):
        (tmp_path / f"start_{number}").mkdir()
        (tmp_path / f"start_{number}" / builds.FILE).write_text("".join(f"{line}\n" for line in ["{torn", *written]))
    assert builds.lines(tmp_path) == ["{torn", *others]
    assert builds.lines(tmp_path, triton=triton.__version__) == own
    assert builds.lines(tmp_path, triton=triton.__version__, target=["cuda", 100, 32]) == []
    assert kernels.run(argparse.Namespace(folder=str(tmp_path), jobs=1)) == 0
    (tmp_path / "start_1" / builds.FILE).write_text(f"{others[0]}\n")
    for number in (2, 3):
        (tmp_path / f"start_{number}" / builds.FILE).unlink()
    with raises(DataError, "3.5.0", triton.__version__):
        kernels.run(argparse.Namespace(folder=str(tmp_path), jobs=1))


def killed(line: str) -> None:
    """As by the kernel that ran out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_build", killed)
    with raises(DataError, "out of memory", "--jobs"):
        builds.build(builds.lines(run), 1)


def test_a_start_builds_what_earlier_ones_recorded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other processes, which end with the run's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen.__init__

    def noted(self: subprocess.Popen[bytes], *args: object, **how: object) -> None:
        popen(self, *args, **how)  # type: ignore[arg-type]
        started.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    gpu = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", gpu)
    with process.kernels_built(run):
        assert started[0].wait(timeout=120) == 0
    assert launched(tmp_path) == [True, True, False]
    started.clear()
    with process.kernels_built(run):
        (building,) = started
    assert building.returncode == -9
    with process.kernels_built(tmp_path):  # nothing was recorded there
        assert len(started) == 1
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "get_current_target", lambda: GPUTarget("cuda", 100, 32))
        with process.kernels_built(run):
            assert len(started) == 1
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with process.kernels_built(run):
        assert len(started) == 1
    assert capsys.readouterr().out.count("are compiled in the background") == 2
    monkeypatch.setattr(triton.runtime.driver, "_active", None)  # no GPU here: Triton has no driver
    with process.kernels_built(run):
        assert len(started) == 1


def test_what_cannot_be_built_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that is gone, a version that is another, and a folder without a record."""
    first = json.loads(builds.lines(run)[0])
    start = tmp_path / "start_1"
    start.mkdir()
    gone = first | {"kernel": first["kernel"].replace("ops.adam.adam", "ops.adam.gone")}
    (start / builds.FILE).write_text(json.dumps(gone) + "\n")
    assert cli.main(["kernels", "build", str(tmp_path), "--jobs", "1"]) == 1
    assert "megacpp_mcore.ops.adam.gone: AttributeError" in capsys.readouterr().out
    with raises(DataError, "of 3.5.0", "--observe"):
        builds.build([json.dumps(first | {"triton": "3.5.0"})], 1)
    with raises(DataError, "of os.system", "megacpp_mcore.*"):
        builds.build([json.dumps(first | {"kernel": first["kernel"].replace("megacpp_mcore.ops.adam.adam", "os.system")})], 1)
    for line in ("{}", "[1]", "torn"):
        with raises(DataError, builds.FILE):
            builds.build([line], 1)
    with raises(DataError, str(run / "start_1"), builds.FILE):
        kernels.run(argparse.Namespace(folder=str(run / "start_1"), jobs=1))
