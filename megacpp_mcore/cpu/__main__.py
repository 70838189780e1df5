"""``python -m megacpp_mcore.cpu SCRIPT [ARGUMENT…]``, or ``-m MODULE [ARGUMENT…]``: runs it on the CPU lane, as Python would.

Any script that uses Megatron, or a module such as pytest. The variables of torchrun are set for one process, unless they are
set already. ``megacpp-mcore launch --device cpu`` does more for a training: checks, records, and a spec's own patches.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from megacpp_mcore import cpu, patches
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.util.stand_in import process_environment


def main(words: Sequence[str]) -> None:
    """Run the script or module that ``words`` begin with, on the lane.

    Raises:
        SystemExit: there is none, or it exits so.
    """
    is_module = words[:1] == ["-m"]
    sys.argv = list(words[is_module:])
    if not sys.argv or not (is_module or os.path.isfile(sys.argv[0])):
        first = repr(sys.argv[0]) if sys.argv else "nothing"
        sys.exit(f"error: found {first}; expected the path of a script, or -m and a module, and then its arguments")
    if not is_module:  # before Megatron is imported, which may be the script's checkout
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    with process_environment():
        try:
            lane = cpu.install()
            patches.apply(["dataset-helpers"])
        except MegacppError as error:
            sys.exit(f"error: {error}")
        with lane:
            if is_module:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
