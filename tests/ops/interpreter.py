"""What programs under Triton's interpreter need of it."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def take_scalars_of_one_element() -> None:
    """The interpreter's loop bounds are arrays of one element, which NumPy 2.4 and later refuse as integers."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
