"""Reset CUDA graphs before NCCL communicators are destroyed. No torch at import."""

from __future__ import annotations

import contextlib
import gc


def reset_graphs() -> None:
    """Destroy every CUDA graph of this process, except those that cannot be, as after an error of the device.

    NCCL (2.28, ``commDestroySync``) waits to destroy a communicator until no graph holds a collective of it.
    """
    import torch

    for graph in [obj for obj in gc.get_objects() if issubclass(type(obj), torch.cuda.CUDAGraph)]:
        with contextlib.suppress(RuntimeError):
            graph.reset()
