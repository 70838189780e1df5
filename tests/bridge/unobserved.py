"""Requests recordings that are impossible; prints the message for each, and for each missing function of Bridge's loop.

python -m tests.bridge.unobserved CORPUS FOLDER       in an environment with Megatron-Bridge; on the CPU lane
"""

import contextlib
import importlib
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.nemo_recipes import run
from megacpp_mcore.nemo_recipes.bridge_loop import SEAMS, BridgeLoop
from megacpp_mcore.observe.clock import Clock
from tests.bridge.processes import TINY

ASKED = (
    ["--observe", "here", "--no-observe"],
    ["--profile", "2-3"],
    ["logger.skip_train_metrics_log=true", "--observe", "{folder}/run"],
)


def refused(corpus: str, folder: str) -> list[tuple[int, str]]:
    """Status and message of each of ``ASKED``."""
    answers = []
    for words in ASKED:
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            options = [word.format(folder=folder) for word in words]
            status = run.main(["--recipe", TINY, f"dataset.data_path={corpus}", *options])
        answers.append((status, error.getvalue()))
    return answers


def without(module: str, name: str) -> tuple[str, bool]:
    """Return the message for a missing ``name``, and whether all other functions are unchanged."""
    holder: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    before = current()
    stock = getattr(holder, last)
    delattr(holder, last)
    config = SimpleNamespace(train=SimpleNamespace(num_epochs=None))
    try:
        with BridgeLoop(config, SimpleNamespace()).observing(Clock(), ()):
            message = "nothing was said"
    except LaunchError as error:
        message = str(error)
    finally:
        setattr(holder, last, stock)
    return message, current() == before


def current() -> list[Any]:
    """The functions of the loop as they are."""
    functions = []
    for seam in SEAMS:
        thing: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            thing = getattr(thing, part, None)
        functions.append(thing)
    return functions


def main() -> None:
    answers = refused(sys.argv[1], sys.argv[2])
    gone = {f"{seam.module}:{seam.name}": without(seam.module, seam.name) for seam in SEAMS}
    print("\n" + json.dumps((answers, gone)))


if __name__ == "__main__":
    main()
