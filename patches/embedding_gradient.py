"""embedding-gradient: the gradient of the token embedding is added to ``main_grad`` by the rows of the tokens that occur.

Upstream fills a dense gradient of the whole vocabulary for each use of the table, the trunk's and one for every MTP depth, sums
them, and adds the sum to ``main_grad``. The kernel is that of :mod:`megacpp_mcore.ops.embedding`.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: GPUs, gradient accumulation fusion, one tensor- and pipeline-parallel rank, weights that nothing else wraps.

With MTP upstream marks the table as one that the output layer uses, too (``zero_out_wgrad``): its data-parallel hook then adds
what autograd has, zeros of the table's size. Only tied embeddings keep the mark.

Fewer sums are rounded to 16 bits, so that the gradient differs from upstream's in the last bits; deterministic mode is kept.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

from megacpp_mcore.patches.linear_cross_entropy import placeholder
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

DEVICE = "cuda"
"""Device of the tables whose gradients the kernel adds."""

_is_depth: contextvars.ContextVar[bool] = contextvars.ContextVar("is_depth", default=False)


@contextlib.contextmanager
def depth_of_mtp() -> Iterator[None]:
    """Mark uses of the table as those of an MTP depth: the trunk's use gives autograd the placeholder for both."""
    token = _is_depth.set(True)
    try:
        yield
    finally:
        _is_depth.reset(token)


@edit(
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    "417ff87fe91384d989d3837e776b22dc0676d5322ac8af1dc101d1aa5c9833ea",
)
def _by_rows(original: Function, self: Any, input_: Any) -> Any:
    if not _fits(self, input_):
        return original(self, input_)
    from megacpp_mcore.ops.embedding import embedding
    from megacpp_mcore.ops.main_grad import MainGrad

    autograd_grad = (lambda: None) if _is_depth.get() else functools.partial(placeholder, self.weight)
    return embedding(input_, self.weight, MainGrad(self.weight.main_grad, autograd_grad))


@edit(
    "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
    "9cdf2778ee6d8aced25eee66c05c2a1fc5cd3a8c937581e01829ca95391b6678",
)
def _marked_if_tied(original: Function, self: Any) -> None:
    original(self)
    if hasattr(self, "embedding") and not self.share_embeddings_and_output_weights:
        vars(self.embedding.word_embeddings.weight).pop("zero_out_wgrad", None)


def _fits(layer: Any, token: Any) -> bool:
    """Return whether the table is unsharded, its gradient needed, and stock's fused accumulation would add it to a buffer."""
    import torch

    weight, config = layer.weight, layer.config
    return bool(
        weight.device.type == DEVICE
        and torch.is_grad_enabled()
        and weight.requires_grad
        and config.gradient_accumulation_fusion
        and hasattr(weight, "main_grad")
        and type(weight) is torch.nn.Parameter
        and not hasattr(weight, "__fsdp_param__")
        and not getattr(weight, "zero_out_wgrad", False)
        and layer.gtp_remat_size == layer.tp_group.size() == config.pipeline_model_parallel_size == 1
        and token.dim() == 2
        and weight.shape[1] % 16 == 0  # as the kernel needs
    )


PATCH = Patch(
    name="embedding-gradient",
    fixes="the embedding's gradient is computed, summed and added over the whole vocabulary, whichever tokens occur",
    source=(
        "megatron-core 0.19.2, megatron/core/tensor_parallel/layers.py and megatron/core/models/common/language_module/"
        "language_module.py"
    ),
    edits=(_by_rows, _marked_if_tied),
    seam=(
        "every use of the table, of the trunk and of every depth of MTP, is this forward pass; the mark is set where the model "
        "is set up"
    ),
    leaves_alone=(
        "tied embeddings, widths that are not multiples of 16, vocabularies divided over ranks, pipeline stages, FSDP, "
        "rematerialised weights, runs without gradient accumulation fusion, evaluation"
    ),
    retire_when="upstream's fused accumulation adds an embedding's gradient by rows",
    cost="nothing",
    gain="`nam56r` on one H200: kernels of 8.1 ms a step give way to 12 of 0.2, on text in bytes",
)
