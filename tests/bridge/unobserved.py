"""Prints, as JSON, what is said of each function of Bridge's loop that is missing, and whether the others stayed as they were.

python -m tests.bridge.unobserved       in an environment with Megatron-Bridge; on the CPU lane
"""

import importlib
import json
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.nemo_recipes.bridge_loop import SEAMS, BridgeLoop
from megacpp_mcore.observe.clock import Clock
from tests.bridge.lane import with_bridge


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
    with with_bridge():
        gone = {f"{seam.module}:{seam.name}": without(seam.module, seam.name) for seam in SEAMS}
    print("\n" + json.dumps(gone))


if __name__ == "__main__":
    main()
