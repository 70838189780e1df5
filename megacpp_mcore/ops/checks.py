"""Input checks shared by all reference ops: floating-point dtypes and matching shapes."""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.te import quantized


def require_float(**tensors: torch.Tensor) -> None:
    """Raise ModelError unless every tensor (given under its own name) has a floating-point dtype and is not quantised."""
    quantized.refuse(**tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ModelError(f"{name} has dtype {tensor.dtype}, expected a floating-point dtype; cast it first")


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype that a reference computes in: float64 if any tensor is float64, else float32.

    Raises:
        ModelError: a tensor's dtype is not floating-point, or it is quantised.
    """
    for tensor in tensors:
        quantized.refuse(tensor=tensor)
        if not tensor.is_floating_point():
            raise ModelError(f"found a tensor of {tensor.dtype}, expected a floating-point dtype; cast it first")
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def one_dtype(op: str, **tensors: torch.Tensor) -> torch.dtype:
    """Return the common dtype of all tensors (each passed under its own name).

    Raises:
        ModelError: dtypes differ, or a tensor is quantised.
    """
    quantized.refuse(**tensors)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    first = next(iter(dtypes.values()))
    if any(dtype != first for dtype in dtypes.values()):
        inputs = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
        raise ModelError(f"{op}'s inputs are {inputs}; its kernels take one dtype: cast them, or use the reference")
    return first


def expect_shape(op: str, name: str, tensor: torch.Tensor, axes: str, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless ``tensor``, one of the inputs of ``op``, has this shape; ``axes`` has one letter per axis."""
    quantized.refuse(**{name: tensor})
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"{name} has shape {tuple(tensor.shape)}; expected {shape} as [{', '.join(axes)}]: "
            f"it must agree with the other inputs of {op}."
        )
