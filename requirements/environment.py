"""Finds or makes the virtual environment of this lock file, outside of the clone; prints the path of its Python.

Its folder is ``${XDG_CACHE_HOME:-~/.cache}/megacpp-mcore/venv-<hash of the lock files and the Python version>``: every
clone with the same lock shares it. It counts as made only when its marker is there; a half-made one is made anew. A
lock keeps two callers from making it at the same time. Only the standard library is used.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCKS = ("demo.txt", "dev.txt")
MARKER = "finished"


def cache_folder() -> Path:
    """The folder that holds the environments."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megacpp-mcore"


def environment_name() -> str:
    """A name that changes with the lock files and with the Python that makes the environment."""
    digest = hashlib.sha256(f"{platform.python_version()} {platform.machine()}\n".encode())
    for lock in LOCKS:
        digest.update((HERE / lock).read_bytes())
    return f"venv-{digest.hexdigest()[:16]}"


def ensure(folder: Path, name: str) -> Path:
    """The Python of the finished environment ``folder/name``; makes it first when it is missing or half-made."""
    target = folder / name
    python = target / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ((target / MARKER).is_file() and python.exists()):
            print(f"making {target} (torch alone is several GB; this happens once)", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)
            venv.create(target, with_pip=True)
            install(python)
            (target / MARKER).write_text("")
    return python


def install(python: Path) -> None:
    """Install the lock file with pip; what pip prints goes to stderr."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    subprocess.run([*command, "-r", str(HERE / LOCKS[-1])], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)


def main() -> int:
    """Print the path of the environment's Python; 1 when there cannot be one."""
    try:
        print(ensure(cache_folder(), environment_name()))
    except subprocess.CalledProcessError as error:
        print(f"pip ended with status {error.returncode}; its messages are above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
