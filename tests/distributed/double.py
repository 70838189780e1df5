"""The stock loop of the wheel in fp64, where no near tie tips over: ``launch -- tests/distributed/double.py ARGUMENTS``.

Products whose rows tensor-parallel ranks send each other are cut, as those of a large model are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megacpp_mcore.launch import pretrain
from megacpp_mcore.layer_specs import exchange


class Double(TorchFunctionMode):
    """Puts ``float64`` in the place of ``float32`` in every call of a torch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, or what does the same in fp64."""
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_wide, args))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].dtype == torch.float64:
            return "torch.cuda.FloatTensor"  # what gradient clipping asserts
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


if __name__ == "__main__":
    exchange.WORTH_PIECES = 0
    torch.set_default_dtype(torch.float64)
    with Double():
        pretrain.main()
