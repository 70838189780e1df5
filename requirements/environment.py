"""Finds or makes a virtual environment of the lock files, outside of the clone; prints the path of its Python.

    python requirements/environment.py [dev|docs|bridge|nemo-run|megatron CHECKOUT]

Its folder is ``${XDG_CACHE_HOME:-~/.cache}/megacpp-mcore/venv-<hash of the lock files and the Python version>`` (``docs-…``
for the documentation and ``nemo-run-…`` for nemo-run, neither of which needs torch; ``bridge-…`` for Megatron-Bridge, which
adds its packages to those of ``dev``, and hides a few by its own versions; ``megatron-…`` hides megatron-core by that of a
checkout, and is named by its sources, too): every clone with the same lock shares it. It counts
as made only when its marker is there; a half-made one is made anew. A lock keeps two callers from making it at the same time.
Only the standard library is used.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCKS = {
    "dev": ("demo.txt", "dev.txt"),
    "docs": ("docs.txt",),
    "bridge": ("demo.txt", "dev.txt", "bridge.txt"),
    "nemo-run": ("nemo-run.txt",),
}
"""The lock files of each environment; the last one is installed. That of ``dev`` names the others."""
WITHOUT_DEPENDENCIES = ("bridge", "nemo-run")
"""Whose lock names all that is needed, and has a package that would bring more."""
RESILIENCY = "nvidia-resiliency-ext==0.7.0"
"""Its wheel says glibc 2.39, and what it holds needs 2.32; nothing else of it that megatron-core can import is on PyPI."""
MARKER = "finished"


class SetupError(RuntimeError):
    """There cannot be an environment; the message says why, and what to do."""


def cache_folder() -> Path:
    """The folder that holds the environments; raises SetupError when there is neither XDG_CACHE_HOME nor a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "megacpp-mcore"
    try:
        return Path.home() / ".cache" / "megacpp-mcore"
    except RuntimeError as error:
        raise SetupError(f"no home folder is known ({error}); set XDG_CACHE_HOME to a writable folder") from error


def environment_name(kind: str) -> str:
    """A name that changes with the lock files of ``kind`` and with the Python that makes the environment."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}\n".encode())
    for lock in LOCKS[kind]:
        digest.update((HERE / lock).read_bytes())
    return f"{'venv' if kind == 'dev' else kind}-{digest.hexdigest()[:16]}"


def ensure(folder: Path, name: str, kind: str) -> Path:
    """The Python of the finished environment ``folder/name`` of ``kind``; makes it first when it is missing or half-made.

    Raises:
        SetupError: the folder cannot be written to, or venv or pip failed.
    """
    target = folder / name
    python = target / "bin" / "python"
    with locked(folder, name):
        if not ((target / MARKER).is_file() and python.exists()):
            size = " (torch alone is several GB; this happens once)" if kind == "dev" else ""
            print(f"making {target}{size}", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)
            create(target)
            if kind == "bridge":
                see_also(target, ensure(folder, environment_name("dev"), "dev"))
            install(python, LOCKS[kind][-1], *(["--no-deps"] if kind in WITHOUT_DEPENDENCIES else []))
            if kind == "bridge":
                install_resiliency(python, packages_of(target))
            (target / MARKER).write_text("")
    return python


def ensure_megatron(folder: Path, checkout: Path) -> Path:
    """The Python of an environment in which the Megatron of ``checkout`` is installed before the packages of ``dev``.

    Raises:
        SetupError: the checkout is none, or pip failed.
    """
    sources = [
        checkout / "pyproject.toml",
        checkout / "setup.py",
        checkout / "README.md",
        *_sources(checkout / "megatron"),
    ]
    if missing := [path for path in (*sources[:3], checkout / "megatron" / "core") if not path.exists()]:
        raise SetupError(f"{checkout} is no Megatron-LM checkout: it has no {missing[0].relative_to(checkout)}")
    digest = hashlib.sha256(environment_name("dev").encode())
    for path in sources:
        digest.update(f"{path.relative_to(checkout)}\n".encode() + path.read_bytes())
    name = f"megatron-{digest.hexdigest()[:16]}"
    target, dev = folder / name, ensure(folder, environment_name("dev"), "dev")
    python = target / "bin" / "python"
    with locked(folder, name), tempfile.TemporaryDirectory() as copied:
        if not (target / MARKER).is_file():
            print(f"making {target}", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)
            create(target)
            see_also(target, dev)
            for path in sources:  # a build writes into its sources
                copy = Path(copied, path.relative_to(checkout))
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            _pip_install(python, "--no-deps", copied)
            (target / MARKER).write_text("")
    return python


def _sources(folder: Path) -> list[Path]:
    """The files of ``folder`` and below, without what Python and builds leave there."""
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so") and not path.is_symlink()
    )


@contextlib.contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Make ``folder`` and hold the lock of its environment ``name``."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / f"{name}.lock", "w"))
        except OSError as error:
            raise SetupError(f"{folder} cannot be written to ({error}); set XDG_CACHE_HOME to a writable folder") from error
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def create(target: Path) -> None:
    """Make the virtual environment ``target``, with nothing but pip in it."""
    try:
        venv.create(target, with_pip=True)
    except subprocess.CalledProcessError as error:  # of ensurepip, whose output venv keeps to itself
        said = (error.output or b"").decode(errors="replace").strip() or f"it ended with status {error.returncode}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} cannot put pip into a virtual environment:\n{said}\n"
            f"install python{version}-venv (Debian, Ubuntu), or say make BASE_PYTHON=/path/to/another/python3.12"
        ) from error
    except (OSError, ValueError) as error:  # no room; a colon in the path
        raise SetupError(
            f"{target} cannot be made ({error}); make room there, or set XDG_CACHE_HOME to another writable folder"
        ) from error


def packages_of(target: Path) -> Path:
    """The folder of the packages of the environment ``target``."""
    return target / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def see_also(target: Path, python: Path) -> None:
    """Let the environment ``target`` see the packages of the one that ``python`` is of, behind its own."""
    (packages_of(target) / "dev.pth").write_text(f"{packages_of(python.parents[1])}\n")


def install_resiliency(python: Path, packages: Path) -> None:
    """Install :data:`RESILIENCY`, past the check of glibc, into the folder ``packages``."""
    options = ["--no-deps", "--platform", "manylinux_2_39_x86_64", "--only-binary=:all:", "--target", str(packages)]
    _pip_install(python, *options, RESILIENCY)


def install(python: Path, lock: str, *options: str) -> None:
    """Install the lock file ``lock`` with pip."""
    _pip_install(python, *options, "-r", str(HERE / lock))


def _pip_install(python: Path, *words: str) -> None:
    """Run pip; what it prints goes to stderr."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *words]
    status = subprocess.run(command, check=False, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode
    if status:
        raise SetupError(f"pip ended with status {status}; its messages are above")


def main() -> int:
    """Print the path of the environment's Python; 1 when there cannot be one."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "dev"
    try:
        if kind == "megatron" and len(sys.argv) == 3:
            print(ensure_megatron(cache_folder(), Path(sys.argv[2]).resolve()))
            return 0
        if kind not in LOCKS:
            raise SetupError(f"there is no environment {kind!r}; expected one of {', '.join(LOCKS)}, megatron CHECKOUT")
        print(ensure(cache_folder(), environment_name(kind), kind))
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
