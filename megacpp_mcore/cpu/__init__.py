"""The CPU lane: a stand-in for ``torch.cuda``, so that stock Megatron trains on a laptop and in CI.

Megatron uses ``torch.cuda`` in some three hundred places. While the lane is installed, the CPU answers those calls;
everything else is Megatron's own code. Semantics:

* ``torch.cuda.is_available()`` is True (Megatron refuses to start otherwise) and ``device_count()`` is the number of
  processes on this host. Tensors stay CPU tensors: ``.device`` and ``.is_cuda`` tell the truth, and every
  ``device="cuda"``, ``device=<int>`` and ``.cuda()`` becomes the CPU. Only ``Tensor.type()`` returns the
  ``torch.cuda`` name, which Megatron's optimizers compare with.
* The generator of each device *is* the CPU generator. Megatron's tracker of model-parallel RNG states is the real one, so
  dropout, initialisation and the states in checkpoints behave as on a GPU, and a resumed run is exactly reproducible.
* There is one stream, on which all work completes immediately: streams and events need to do nothing to keep order, events
  measure wall-clock time, and memory figures are those of the process (resident set).
* ``get_device_capability()`` is (0, 0): code that requires a GPU generation refuses it as too old.

:mod:`.torch_cuda` implements this, :mod:`.megatron` replaces a few functions of Megatron, and :mod:`.lane` installs and removes
all of it. Nothing is replaced before :func:`install`, :attr:`CpuLane.messages` names what was, and :meth:`CpuLane.remove`
restores every original. Checked with torch 2.11 and megatron-core 0.19.2.
"""

from megacpp_mcore.cpu.lane import CpuLane, install, is_active, missing_arguments

__all__ = ["CpuLane", "install", "is_active", "missing_arguments"]
