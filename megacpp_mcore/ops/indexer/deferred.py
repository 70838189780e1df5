"""Index scores that are computed lazily, when first read: most callers drop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megacpp_mcore.errors import ModelError


class DeferredScores(torch.Tensor):
    """A tensor of known shape, dtype and device, computed when an operation first reads it, and cached from then on.

    Any torch operation reads it. Direct access to its memory (``data_ptr``, ``numpy``) fails, because it has none; an
    operation's result (``scores + 0``) is an ordinary tensor.

    Args:
        compute: computes the scores; called at most once.
        inputs: the tensors that it reads; if one was changed in place before the first read, computing the scores fails.
        shape: of the scores.
        dtype: of the scores.
        device: of the scores.
    """

    _compute: Callable[[], torch.Tensor] | None
    _inputs: tuple[tuple[torch.Tensor, int], ...]
    _scores: torch.Tensor

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        compute: Callable[[], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> DeferredScores:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self._compute = compute
        self._inputs = tuple((tensor, _version(tensor)) for tensor in inputs)
        return self

    def computed(self) -> torch.Tensor:
        """Return the scores as an ordinary tensor, computing them if needed.

        Raises:
            ModelError: an input was changed in place before the first use.
        """
        if self._compute is not None:
            for tensor, version in self._inputs:
                if _version(tensor) != version:
                    raise ModelError(
                        f"index scores were first read after their input of shape {list(tensor.shape)} was changed "
                        "in place, expected them to be read before that; call scores.clone() as soon as they are returned"
                    )
            self._scores = self._compute()
            self._compute, self._inputs = None, ()
        return self._scores

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "computed" if self._compute is None else "not computed"
        return f"DeferredScores(shape={list(self.shape)}, dtype={self.dtype}, {state})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` on the computed scores."""
        args, kwargs = tree_map_only(cls, cls.computed, (args, kwargs or {}))
        return func(*args, **kwargs)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
