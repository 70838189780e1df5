"""A program: one case of an op's kernels under Triton's interpreter, on a CPU: ``python -m tests.ops.interpreter OP CASE``.

The cases are those of ``<op>_interpreted.py``, whose ``main`` fails unless every result is right. Run with TRITON_INTERPRET=1,
which Triton reads as it is imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from triton.runtime import interpreter


def take_scalars_of_one_element() -> None:
    """The interpreter's loop bounds are arrays of one element, which NumPy 2.4 and later refuse as integers."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if __name__ == "__main__":
    take_scalars_of_one_element()
    importlib.import_module(f"tests.ops.{sys.argv[1]}_interpreted").main(sys.argv[2])
