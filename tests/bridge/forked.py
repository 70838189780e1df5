"""Stands for a ``python`` in a shell: runs WORDS in a fork of a process of PYTHON that has imported what they need.

python -m tests.bridge.forked PYTHON WORDS       with the variable of :func:`tests.forks.shared`
"""

import os
import sys
from pathlib import Path

from tests import forks


def words(python: Path) -> str:
    """Bash text of such a Python."""
    return f'"{sys.executable}" -m tests.bridge.forked "{python}"'


def main() -> None:
    python, *program = sys.argv[1:]
    of_checkout = any(word.endswith(".py") for word in program)  # a script, which brings its own Megatron
    how = {"cwd": Path.cwd(), "env": dict(os.environ), "python": python, "megatron": not of_checkout}
    done = forks.run(program, **how)
    print(done.stdout, end="", flush=True)
    print(done.stderr, end="", file=sys.stderr)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
