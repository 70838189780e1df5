"""Python programs in forks of a process that has imported torch: its import takes longer than what most of them do.

``run`` and ``start`` take the words behind ``python`` (``-m MODULE …``, ``-c CODE …``, ``FILE …``), and which Python: this
one, or that of the environment with Megatron-Bridge, whose libraries take ten seconds. A program has its own session,
environment (this process's with this tree first on its path, if ``env`` is not another, and further ``variables``), path and
files, imports Megatron and this package itself, and ends as any other, but that modules are taken apart only with the variable
WHOLE_END, as that costs more than most programs do; warnings are off. The first process that ``multiprocessing`` spawns for it
is a fork, too, made before the program began: Megatron spawns one, which imports torch, for the first checkpoint of a process.
With ``megatron`` the wheel's Megatron is there already, without the CPU lane, and this package's commands, as in the tests'
own process, and in the other environment Megatron-Bridge: for what is not about a start. Where Python's own start matters, or
what is imported, or what a library reads from the environment as it is imported, ``subprocess`` starts it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import gc
import hashlib
import importlib
import itertools
import json
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]
PATIENCE_S = 600
"""For what comes at once, or in seconds: a machine may be slow, and busy with something else."""
_LIBRARIES = (
    "torch._inductor.compile_fx", "torch.distributed._symmetric_memory", "torch.distributed.checkpoint",
    "torch.distributed.rpc", "torch.distributed.tensor.experimental", "torch.export", "torch.nn.attention.flex_attention",
    "torch.testing", "torch.utils.cpp_extension", "jinja2", "networkx", "psutil", "yaml",
)  # fmt: skip
"""What Megatron imports, without Megatron: a checkout's may come first, and the CPU lane has to come before it."""
_MEGATRON = (
    "megatron.core.datasets.gpt_dataset", "megatron.core.models.mimo", "megatron.core.tokenizers.text",
    "megatron.training.models.hybrid", "megatron.training.training", "megacpp_mcore.commands.cli",
)  # fmt: skip
"""And of this package what a command imports before it does anything, which is nothing of Megatron."""
_BRIDGES = (
    "accelerate", "datasets", "multistorageclient", "nvidia_resiliency_ext.inprocess", "omegaconf", "pandas", "peft",
    "scipy.optimize", "sklearn.metrics", "torch.utils.tensorboard", "transformers.loss.loss_utils",
    "transformers.modeling_utils", "transformers.models.auto", "transformers.trainer_utils", "wandb",
)  # fmt: skip
"""What Megatron-Bridge imports beside, without modelopt, which imports Megatron."""
_BRIDGE = "tests.bridge.imported"


class Program:
    """A started program, as ``subprocess.Popen`` has it, in its own session and process group."""

    def __init__(self, pid: int, status: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status, self._ended = status, os.pidfd_open(pid)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it, with all that it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def poll(self) -> int | None:
        """The status, negative where a signal ended it; None: it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The status, once there is one; TimeoutExpired if there is none after ``timeout`` seconds."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            while not self._status.exists():  # it is written as soon as it has ended
                time.sleep(0.001)
            self.returncode = int(self._status.read_text())
            os.close(self._ended)
        return self.returncode


def trial() -> SimpleNamespace:
    """What :mod:`megacpp_mcore.commands.trial` has of ``subprocess``, for its Python programs."""

    def begin(command: Sequence[str], *, cwd: str, env: Mapping[str, str], stderr: Any, **_: Any) -> Any:
        files = {"output": Path(os.devnull), "error": Path(stderr.name)}
        return start(command[1:], cwd=Path(cwd), env=env, **files)

    return SimpleNamespace(Popen=begin, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)


def start(
    words: Sequence[str],
    output: Path,
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    error: Path | None = None,
    python: str = sys.executable,
    megatron: bool = False,
    **variables: str,
) -> Program | subprocess.Popen[bytes]:
    """Start a program that writes its output to the file ``output``, and its errors to ``error`` or, without it, also there."""
    words, error = list(map(str, words)), error or output
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**(os.environ | {"PYTHONPATH": path} if env is None else env), **variables}
    if Path("/dev/nvidiactl").exists():  # CUDA does not stand a fork
        with output.open("ab") as out, error.open("ab") as err:
            return subprocess.Popen(
                [python, "-W", "ignore", *words],
                cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
    folder, requests = server(python, env.get("TRITON_INTERPRET"))
    request = _folder() / f"{next(_numbers)}.json"
    begun, status = request.with_suffix(".pid"), request.with_suffix(".status")
    files = {"cwd": str(cwd), "output": str(output), "error": str(error), "begun": str(begun), "status": str(status)}
    request.write_text(json.dumps({"words": words, "env": env, "megatron": megatron, **files}))
    (unread := select.poll()).register(requests, 0)
    with _known_to_end(folder):
        os.write(requests, f"{request}\n".encode())
        while not begun.exists():
            if unread.poll(1):
                raise BrokenPipeError
    return Program(int(begun.read_text()), status)


def run(
    words: Sequence[str],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
    python: str = sys.executable,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; after ``timeout`` seconds it is killed, with all that it started."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "output"), Path(folder, "error")
        program = start(words, files[0], cwd=cwd, env=env, error=files[1], python=python, **variables)
        try:
            program.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(words, program.wait(), *(file.read_text() for file in files))


def start_ranks(
    words: Sequence[str],
    outputs: Sequence[Path],
    *,
    python: str = sys.executable,
    megatron: bool = False,
    **variables: str,
) -> list[Program | subprocess.Popen[bytes]]:
    """Start a program as torchrun does, in a process for each of ``outputs``, with nobody who would end them together."""
    port, count = held_port(), len(outputs)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port.getsockname()[1]}
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, **address}
    programs = []
    for rank, output in enumerate(outputs):
        of_rank = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        programs.append(start(words, output, python=python, megatron=megatron, **variables, **of_rank))
    weakref.finalize(programs[0], port.close)
    return programs


def held_port() -> socket.socket:
    """A free port that nobody else is given while this socket is open; only who names it, as rank 0 does, can listen there."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("localhost", 0))
    return port


def wait_until(
    holds: Callable[[], object], said: Callable[[], str] = str, *, within_s: float = PATIENCE_S, every_s: float = 0.02
) -> None:
    """Wait until ``holds()`` is true; on a timeout fail with the text that ``said`` returns."""
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, f"not in {within_s} s: {said()[-3000:]}"
        time.sleep(every_s)


def run_ranks(
    words: Sequence[str], count: int, *, timeout: float = PATIENCE_S, megatron: bool = False, **variables: str
) -> tuple[int, str]:
    """Run a program in ``count`` processes as torchrun does, until one fails; the first status but 0, and all output."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(count)]
        programs = start_ranks(words, files, megatron=megatron, **variables)
        until = time.monotonic() + timeout
        while None in [program.poll() for program in programs] and time.monotonic() < until:
            if any(program.returncode for program in programs):
                break
            time.sleep(0.02)
        failed = [program.returncode for program in programs if program.returncode]
        for program in programs:
            if program.returncode is None:
                os.killpg(program.pid, signal.SIGKILL)
                failed.append(program.wait())
        return next(iter(failed), 0), "\n".join(file.read_text(errors="replace") for file in files)


_numbers = itertools.count()


_RUN = "PYTEST_XDIST_TESTRUNUID"


def shared(python: str) -> dict[str, str]:
    """The variable with which other processes, too, have their programs forked by the process that forks for this one."""
    server(python, os.environ.get("TRITON_INTERPRET"))
    return {_RUN: _run_id()}


def _run_id() -> str:
    return os.environ.get(_RUN, str(_folder()))


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def server(python: str, interpret: str | None) -> tuple[Path, int]:
    """Start the process that forks, one for all of pytest's workers, until the last ends; its folder, and the pipe it reads."""
    what = __file__, python, interpret, _run_id()
    folder = _folder().with_name(f"forks-{hashlib.sha256(repr(what).encode()).hexdigest()}")
    folder.mkdir(exist_ok=True)
    pipe = folder / "requests"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if interpret is not None:  # Triton reads it as it is imported
        env["TRITON_INTERPRET"] = interpret
    if has_bridge := python != sys.executable:  # and Hugging Face's libraries these
        env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "huggingface")}
    with open(folder / "lock", "w") as lock, _known_to_end(folder):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_new := not pipe.exists():
            os.mkfifo(pipe)
            descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
        requests = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # else it waits here for who reads
        os.set_blocking(requests, True)
        if is_new:
            libraries = (_LIBRARIES + _BRIDGES, (*_MEGATRON, _BRIDGE)) if has_bridge else (_LIBRARIES, _MEGATRON)
            with open(descriptor) as requested, (folder / "error").open("wb") as error:
                command = [python, "-P", "-W", "ignore", __file__, str(folder), *map(",".join, libraries)]
                subprocess.Popen(command, env=env, stdin=requested, stdout=error, stderr=error)
    return folder, requests


@contextlib.contextmanager
def _known_to_end(folder: Path) -> Iterator[None]:
    """Say why the process that forks has ended, where nobody reads its pipe any more."""
    try:
        yield
    except OSError as error:
        if error.errno not in (None, errno.EPIPE, errno.ENXIO):
            raise
        raise AssertionError(f"the process that forks has ended: {(folder / 'error').read_text()[-2000:]}") from error


# --- The process that forks ---------------------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Fork a keeper for every request, which waits for the program; the request, in the process that is to be it, else None.

    What is to have Megatron, a fork of this process does so, which imports it.
    """
    gc.set_threshold(50_000)  # of every program, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to pytest; this process ends after it
    folder, libraries, with_megatron = sys.argv[1:]
    for library in libraries.split(","):
        __import__(library)
    assert "megatron" not in sys.modules
    requests, other = sys.stdin, None
    while True:
        gc.freeze()  # else a program goes through all of it when it ends
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
        if not (line := requests.readline()):  # all that could ask have ended
            if requests is sys.stdin:
                shutil.rmtree(folder, ignore_errors=True)
            return None
        request: dict[str, Any] = json.loads(Path(line.strip()).read_text())
        if request["megatron"] and "megatron" not in sys.modules:
            if other is None:
                ours, its = os.pipe()
                if not os.fork():
                    os.close(its)
                    requests = os.fdopen(ours)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Megatron waits for git
                    try:
                        with contextlib.redirect_stdout(sys.stderr):
                            sys.path.insert(0, str(ROOT))
                            for library in with_megatron.split(","):
                                importlib.import_module(library)
                            del sys.path[0]
                        # The texts of --help, for which it parses the source of its configuration in every process.
                        factory = sys.modules["megatron.training.argument_utils"].ArgumentGroupFactory
                        factory._get_field_docstrings = lambda *_: {}
                    except BaseException:  # or who waits for an answer would wait for ever
                        traceback.print_exc()
                        os.kill(os.getppid(), signal.SIGKILL)
                        os._exit(1)
                    continue
                os.close(ours)
                other = os.fdopen(its, "w", buffering=1)
            other.write(line)
            continue
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            return request
        _tell(request["begun"], pid)
        _tell(request["status"], os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)


def _tell(file: str, number: int) -> None:
    """Write a file, which is whole as soon as it is there."""
    written = Path(f"{file}.new")
    written.write_text(str(number))
    written.rename(file)


def _lend_a_fork() -> None:
    """Fork a process that waits, as nothing but Python with torch, until ``multiprocessing`` spawns the first of its own."""
    ours, its = socket.socketpair()
    lent = [os.fork()]
    if not lent[0]:
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the program's, until there is something to interrupt
        message, numbers, _, _ = socket.recv_fds(its, 1 << 20, 64)
        its.close()
        if not message:
            os._exit(0)  # the program has ended
        request = json.loads(message)
        moved = [fcntl.fcntl(number, fcntl.F_DUPFD, 1000) for number in numbers]
        for number in numbers:
            os.close(number)
        for number, wanted in zip(moved, request["files"], strict=True):
            os.dup2(number, wanted)
            os.close(number)
        os.environ.clear()
        os.environ.update(request["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["-c", "--multiprocessing-fork"]
        multiprocessing.spawn.spawn_main(**request["arguments"])
    its.close()
    spawn = multiprocessing.util.spawnv_passfds

    def spawn_or_use(path: Any, words: Sequence[Any], files: Sequence[int]) -> int:
        texts = [os.fsdecode(word) for word in words]
        called = re.search(r"spawn_main\((.*)\)", " ".join(texts))
        if "--multiprocessing-fork" not in texts or called is None or not lent:
            return spawn(path, words, files)
        arguments = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", called[1])}
        request = {"arguments": arguments, "files": sorted(files), "environment": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(request).encode()], sorted(files))
        ours.close()
        return lent.pop()

    multiprocessing.util.spawnv_passfds = spawn_or_use


def _become(request: Mapping[str, Any]) -> None:
    """Run the program of a request in this process, as Python would."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], flags),
        (2, request["error"], flags),
    ):
        file = os.open(path, how, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _lend_a_fork()
    if Version(sys.modules["triton"].__version__) >= Version("3.9"):  # which lists on stderr what is alive at the end
        atexit.register(gc.unfreeze)
    first, *words = request["words"]
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.path[:0] = [request["cwd"], *paths]
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    program = Path(first)
    if first == "-c":
        program = Path(request["status"]).with_suffix(".py")
        # As with Python's own -c there is no file, which a process that the program spawns would run once more.
        program.write_text(f"del __file__\n{words.pop(0)}")
    sys.path[:0] = ["" if first == "-c" else str(program.parent), *paths]
    sys.argv = [first, *words]
    runpy.run_path(str(program), run_name="__main__")


def _run(request: Mapping[str, Any]) -> None:
    """Be the program, and note the status with which Python is about to end."""
    try:
        _become(request)
        _ended.append(0)
    except SystemExit as end:
        _ended.append(0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1)
        raise
    except Exception:
        _ended.append(1)
        raise


def _leave() -> None:
    """End with that status, without taking modules apart."""
    if _ended and "WHOLE_END" not in os.environ:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
        os._exit(_ended[0])


if __name__ == "__main__":
    _ended: list[int] = []
    atexit.register(_leave)  # to be called as the last, without threads, after what these here have to end
    for earlier in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.unregister(earlier)
        atexit.register(earlier)
    request = _serve()
    if request is not None:
        _run(request)
