"""The CPU lane: a stand-in for ``torch.cuda``, so that stock Megatron trains on a laptop and in CI.

Megatron asks for a GPU in some three hundred places. While the lane is installed those questions are answered by the
CPU; Megatron's own code is what runs. What the answers mean:

* ``torch.cuda.is_available()`` is True (Megatron refuses to start otherwise) and ``device_count()`` is the number of
  processes of this host. Tensors stay CPU tensors: ``.device`` and ``.is_cuda`` tell the truth, and every
  ``device="cuda"``, ``device=<int>`` and ``.cuda()`` becomes the CPU. Only ``Tensor.type()`` answers with the
  ``torch.cuda`` name, which Megatron's optimizers compare with.
* The generator of each device *is* the CPU generator. Megatron's tracker of model-parallel states is the real one, so
  dropout, initialisation and the states kept in checkpoints behave as on a GPU, and a resumed run repeats exactly.
* There is one stream and all work on it is done at once: streams and events keep order by doing nothing, events
  measure wall-clock time, and the memory figures are those of the process (resident set).
* ``get_device_capability()`` is (0, 0): whatever asks for a GPU generation is refused as on one that is too old.

:mod:`.torch_cuda` has these answers, :mod:`.megatron` the few things of Megatron that are replaced besides, and
:mod:`.lane` puts all of it in place and takes it back. Nothing is replaced before :func:`install`,
:attr:`CpuLane.messages` names what was, and :meth:`CpuLane.remove` puts every original back. Checked with torch 2.11 and
megatron-core 0.19.2.
"""

from megacpp_mcore.cpu.lane import CpuLane, answers_here, install, missing_arguments, stepping_aside

__all__ = ["CpuLane", "answers_here", "install", "missing_arguments", "stepping_aside"]
