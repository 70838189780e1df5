"""exit-signal: ``--exit-signal-handler`` costs a step no wait for the GPU, and no read per rank.

Activate: applied by the launcher with ``--exit-signal-handler``; or ``megacpp_mcore.patches.apply(["exit-signal"])``.
Scope: the question after each step whether any rank has received the signal; it is answered one step later.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, edit


@edit(
    "megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
    "bb02726f1cdcd43ea2deb1ceef6842093c4697bbe8fb14191578e3497cd8b044",
)
def answer_a_step_later(original: Function, self: Any) -> Any:
    """Replace ``DistributedSignalHandler.signals_received()``; Megatron-Bridge has a copy of the class."""
    import torch

    if not torch.distributed.is_initialized():
        return original(self)
    answer, copied = getattr(self, "_pending_flag", (None, None))
    on_gpu = "nccl" in torch.distributed.get_backend()
    flag = torch.tensor([self._signal_received], dtype=torch.int32, pin_memory=on_gpu)
    on_device = flag.to("cuda", non_blocking=True) if on_gpu else flag
    torch.distributed.all_reduce(on_device, torch.distributed.ReduceOp.MAX)
    self._pending_flag = flag, None
    if on_gpu:
        flag.copy_(on_device, non_blocking=True)
        self._pending_flag = flag, torch.cuda.current_stream().record_event()
    if copied is not None:
        copied.synchronize()
    return [] if answer is None else [bool(answer)]


PATCH = Patch(
    name="exit-signal",
    fixes="with --exit-signal-handler the host waits in each step for the GPU, and then for one copy per rank",
    source="megatron-core 0.19.2, megatron/training/dist_signal_handler.py",
    edits=(answer_a_step_later,),
    seam="signals_received is the one place where ranks agree about the signal",
    leaves_alone="the signal's handler, and what the loop does about it: all ranks still save and end after the same step",
    retire_when="upstream checks without waiting for the GPU",
    cost="the run ends one step later",
)
