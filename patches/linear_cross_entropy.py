"""linear-cross-entropy: the losses of the main head and of every MTP depth are computed without materialising logits.

Activate: applied by our specs on GPUs, unless ``speed_defaults.linear_cross_entropy`` is false, or by name.
Scope: GPTModel and HybridModel called with labels. The stock path stays, and the reason is logged once, if anything else needs
the logits or owns their gradient: an inference engine, an ``output_processor``, the configuration logger, a custom loss or
logit scale of the model, an output layer that is not exactly ColumnParallelLinear (MXFP8, say), has hooks, does not reduce its
gradient or defers it (``defer_embedding_wgrad_compute``), a weight that is not a plain tensor or belongs to Megatron-FSDP or to
sharded rematerialisation (GTP), Transformer Engine's cross-entropy, autocast. Without labels there is no loss, and stock runs
without a log line. With labels nothing is gathered over the tensor-parallel ranks (``parallel_output`` false,
``runtime_gather_output``): stock's loss counts a gathered logit once a rank (NVIDIA/Megatron-LM#7452).
Provenance: megatron-core 0.19.2 ``core/models/{gpt/gpt_model,hybrid/hybrid_model}.py``,
``core/models/common/language_module/language_module.py``, ``core/transformer/multi_token_prediction.py`` and
``core/tensor_parallel/layers.py``. Other upstream commits have a ``LinearCrossEntropyModule`` (kernels for Blackwell) as output
layer; 0.19.1 and 0.19.2 have neither it nor an option for it. Not being exactly ColumnParallelLinear, it would be left alone.

How it works: while one of the two models runs with labels, its output layer returns :class:`LazyLogits`, which stores the
operands of the logits, and ``compute_language_model_loss`` requests the losses from it. :class:`LazyLogits` supports what
stock does with logits in between (muP's scale, MTP's count of correct predictions); anything else raises an exception.

The op gets the loss mask by which its losses will be multiplied: for an MTP depth the one that ``process_mtp_loss`` has rolled
along with the labels; for the main head, under a stock script, the model's own, which the script's loss function multiplies
by. Any other caller of the model may weight its losses freely, so the op gets no mask: through Bridge the main head takes a
fourth product. The op's assertion stops a stock script whose loss function multiplies by anything else.

Each head is a separate call. A single call for all heads was measured (rows ``linear_cross_entropy_heads`` of
``experiments/results/bench_h200.csv``): 1 % faster, 0.5 of 2.3 GB less. But it must know the ratio of the main loss to a
depth's before the loss function runs, and abort the run if that turns out different; a call per head needs only its mask.

Shape legend: S sequence, B batch, H hidden width, V vocabulary of this rank.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import Speed
from megacpp_mcore.backends import observed as backends
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.errors import PatchError
from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, bound_replacement, edit

if TYPE_CHECKING:
    import torch

    from megacpp_mcore.ops.linear_cross_entropy.chunked import TokenLosses
    from megacpp_mcore.ops.main_grad import MainGrad

logger = logging.getLogger(__name__)

_OP = "linear_cross_entropy"


@dataclass
class _Run:
    """A model that is running with labels and is in scope.

    Attributes:
        layer: its output layer, which returns lazy logits.
        labels: those the model was called with, ``[B, S]``.
        loss_mask: the factor on the main head's losses, ``[B, S]``; None: unknown.
        rolled_mask: the loss mask as last rolled by MTP; None without one.
    """

    layer: Any
    labels: Any
    loss_mask: Any
    rolled_mask: Any

    def mask_of(self, labels: Any) -> Any:
        """Return the factor on the losses of ``labels``: the model's mask for its own labels, else MTP's rolled mask."""
        return self.loss_mask if labels is self.labels else self.rolled_mask


_running: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("linear_cross_entropy_run", default=None)


class LazyLogits:
    """Stands in for an output layer's ``scale · (hidden weightᵀ + bias)`` when only the losses are needed.

    Deliberately not a tensor subclass, whose memory compiled code would read: an unforeseen consumer must fail rather than get
    wrong numbers. Under sequence parallelism ``hidden`` is this rank's shard of axis 0.
    """

    def __init__(self, layer: Any, hidden_SBH: torch.Tensor, weight_VH: torch.Tensor, scale: float = 1.0) -> None:
        self._layer, self._hidden_SBH, self._weight_VH, self._scale = layer, hidden_SBH, weight_VH, scale
        self._computed: TokenLosses | None = None

    def losses(self, label_SB: torch.Tensor, mask_SB: torch.Tensor | None) -> torch.Tensor:
        """Cross-entropy per token, [S, B]; the caller has to multiply it by the mask, if one is passed."""
        from megacpp_mcore.ops.linear_cross_entropy.chunked import VocabShards, linear_cross_entropy

        group = self._layer.tp_group
        self._computed = linear_cross_entropy(
            self._hidden_SBH,
            self._weight_VH,
            label_SB,
            bias_V=self._layer.bias,
            logit_scale=self._scale,
            token_weight=mask_SB,
            shards=VocabShards(group, self._layer.sequence_parallel) if group.size() > 1 else None,
            main_grad=_main_grad(self._layer, self._weight_VH),
        )
        return self._computed.loss

    def size(self, axis: int) -> int:
        """Return the length of one axis of [S, B, V]."""
        sequence, batch, _ = self._hidden_SBH.shape
        ranks = self._layer.tp_group.size() if self._layer.sequence_parallel else 1
        return (sequence * ranks, batch, self._weight_VH.shape[0])[axis]

    def max(self, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit of each token and its index in V, as [S, B] each, without gradients.

        Raises:
            PatchError: ``dim`` is not the last axis, or the loss has not been computed yet.
        """
        if dim not in (-1, 2):
            raise PatchError(_misuse(f"max over axis {dim}"))
        if self._computed is None:
            raise PatchError(_misuse("max before the loss"))
        return self._computed.top_logit, self._computed.top_column

    def __mul__(self, factor: float) -> LazyLogits:
        if not isinstance(factor, int | float):
            raise PatchError(_misuse(f"multiplication by a {type(factor).__name__}"))
        return LazyLogits(self._layer, self._hidden_SBH, self._weight_VH, self._scale * factor)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Supports only ``torch.argmax(logits, dim=-1)``."""
        import torch

        if func is torch.argmax and len(args) == 1 and dict(kwargs or {}) == {"dim": -1}:
            return args[0].max(dim=-1)[1]
        raise PatchError(_misuse(getattr(func, "__name__", str(func))))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_misuse(name))


def _misuse(what: str) -> str:
    return (
        f"the patch linear-cross-entropy left no logits for {what!r}, only their losses; revert the patch, or tell its "
        "maintainers what needs them"
    )


def _main_grad(layer: Any, weight_VH: torch.Tensor) -> MainGrad | None:
    """Return the buffer to which stock's fused accumulation would add the weight's gradient; None if fusion is off."""
    from megacpp_mcore.ops.main_grad import MainGrad

    if not (layer.gradient_accumulation_fusion and hasattr(weight_VH, "main_grad")):
        return None
    buffer_VH = weight_VH.main_grad
    return MainGrad(buffer_VH, functools.partial(_flagged, weight_VH, buffer_VH))


def _flagged(weight_VH: Any, buffer_VH: torch.Tensor) -> torch.Tensor | None:
    weight_VH.main_grad = buffer_VH
    return placeholder(weight_VH)


def placeholder(weight: Any) -> torch.Tensor | None:
    """Flag to the data-parallel hooks that the gradient is in ``main_grad``; returns what autograd must get for them to fire.

    Megatron adds it where ``zero_out_wgrad`` is set, as for tied embeddings, and there it is zero.
    """
    import torch

    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Not shared by all weights of a shape, as stock's is: that one stays allocated, this one only until the hook has run.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


@edit(
    "megatron.core.models.gpt.gpt_model:GPTModel._postprocess",
    "41700c5f809c197c24d995bcb23b1638edc799c3542fec904567f32ce5af8f19",
    make=bound_replacement,
)
def _with_lazy_logits(original: Function, bound: BoundArguments) -> Any:
    """Replace ``GPTModel._postprocess`` and ``HybridModel.forward``."""
    import torch

    arguments = bound.arguments
    self = arguments["self"]
    if not self.post_process or arguments.get("labels") is None:
        return original(*bound.args, **bound.kwargs)
    obstacle = _of_call(self, arguments)
    if obstacle is None:
        if self.tp_group.size() > 1:
            arguments["runtime_gather_output"] = False  # stock's loss is that of each rank's part
        obstacle = _of_settings(self.config) or _of_layer(self.output_layer) or _of_weight(self)
    if obstacle is not None:
        _note(self, "megatron", obstacle)
        _log_once(self, obstacle)
        return original(*bound.args, **bound.kwargs)
    _note(self, _OP, "the patch linear-cross-entropy")
    mask = arguments.get("loss_mask")
    global_vars = sys.modules.get("megatron.training.global_vars")
    of_main = None if global_vars is None or global_vars._GLOBAL_ARGS is None else mask  # stock's script passes it
    if mask is None and self.config.mtp_num_layers:
        # Bridge passes none. The same as MTP's own, which could not be followed.
        arguments["loss_mask"] = mask = torch.ones_like(arguments["labels"], dtype=torch.float32)
    token = _running.set(_Run(self.output_layer, arguments["labels"], of_main, mask))
    try:
        return original(*bound.args, **bound.kwargs)
    finally:
        _running.reset(token)


def _note(model: Any, observed: str, reason: str) -> None:
    """Record the observed backend; as our model applies the patch itself, the user need not have requested it."""
    by_itself = observed != _OP and hasattr(model.config, checkpoint_layout.KEY)
    requested = backends.AUTO if by_itself else _OP
    backends.note("loss", observed, reason, speed=Speed.COMPILED, requested=requested)


def _of_call(model: Any, arguments: Mapping[str, Any]) -> str | None:
    """Return what other than stock's loss gets the logits of this call, if anything."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.models.common.language_module.language_module import LanguageModule

    if InferenceMode.is_active():
        return "an inference engine is active"
    if arguments.get("output_processor") is not None:
        return "an output_processor wants the output layer"
    for method in ("compute_language_model_loss", "_scale_logits"):
        if method in vars(model) or getattr(type(model), method) is not getattr(LanguageModule, method):
            return f"the model has its own {method}"
    return None


def _of_settings(config: Any) -> str | None:
    from megatron.core.config_logger import has_config_logger_enabled

    if has_config_logger_enabled(config):
        return "the configuration logger writes the logits"
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        return "cross_entropy_fusion_impl asks for Transformer Engine's cross-entropy"
    return None


def _of_layer(layer: Any) -> str | None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    if type(layer) is not ColumnParallelLinear or "forward" in vars(layer):
        return f"the output layer is a {type(layer).__name__}, not a plain ColumnParallelLinear"
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "the output layer has hooks, which get its logits or their gradient"
    if layer.config.defer_embedding_wgrad_compute:
        return "defer_embedding_wgrad_compute keeps the gradient of the logits"
    if layer.disable_grad_reduce or layer.explicit_expert_comm:
        return "the output layer does not reduce the gradient of its input"
    if getattr(layer, "output_dtype", None) is not None:
        return f"the output layer computes {layer.output_dtype} logits (--output-logit-dtype)"
    return "the output layer does not add its bias" if layer.skip_bias_add and layer.bias is not None else None


def _of_weight(model: Any) -> str | None:
    import torch

    layer = model.output_layer
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return f"the output weight is a {type(weight).__name__}"
    if hasattr(weight, "__fsdp_param__"):
        return "Megatron-FSDP owns the gradient of the output weight"
    if torch.is_autocast_enabled(weight.device.type):
        return "autocast is on"
    return "the output weight is sharded for rematerialisation (GTP)" if layer.gtp_remat_size > 1 else None


def _log_once(model: Any, obstacle: str) -> None:
    """Log one line, on the first rank of the pipeline stage."""
    groups = (getattr(model.pg_collection, name, None) for name in ("tp", "dp_cp"))
    if all(group is None or group.rank() == 0 for group in groups):
        _warn(f"linear-cross-entropy: {type(model).__name__} keeps its logits: {obstacle}")


@functools.cache
def _warn(message: str) -> None:
    logger.warning(message)


@edit(
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward",
    "dac5d6cfeaa44ba64dddce0408a797439050439c0010b5fa3d5d25e8eff43a08",
    "43a9d792d308755dfccee347bdc400f3f519e41547a156e5968d9e32ee88611e",
)
def _lazy_output(
    original: Function, self: Any, input_: Any, weight: Any = None, runtime_gather_output: bool | None = None
) -> Any:
    """Replace ``ColumnParallelLinear.forward``: the running model's output layer returns lazy logits."""
    run = _running.get()
    if run is None or run.layer is not self:
        return original(self, input_, weight, runtime_gather_output)
    return LazyLogits(self, input_, self.weight if weight is None else weight), None


@edit(
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
    "cfdd820917a28309a77d4fe939ac3629dfe9c9b273eda1c332b49a33fd78ef39",
)
def _lazy_loss(original: Function, self: Any, labels: Any, logits: Any) -> Any:
    if not isinstance(logits, LazyLogits):
        return original(self, labels, logits)
    run = _running.get()
    mask = None if run is None else run.mask_of(labels)
    mask_SB = None if mask is None else mask.transpose(0, 1)
    return logits.losses(labels.transpose(0, 1).contiguous(), mask_SB).transpose(0, 1).contiguous()


@edit(
    "megatron.core.transformer.multi_token_prediction:roll_tensor",
    "576f3fcb1c365bc92bcaea1d9253eb5014b6335f446c2a0f0b490587776ec426",
    "d5bb3daa0b6ece1d1d543884a76eb80aa2c1af4817a1070c03627513d62f2069",
)
def _followed_roll(original: Function, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``multi_token_prediction.roll_tensor``: tracks the rolled loss mask of the running model."""
    rolled = original(tensor, *args, **kwargs)
    run = _running.get()
    if run is not None and tensor is not None and tensor is run.rolled_mask:
        run.rolled_mask = rolled[0]
    return rolled


PATCH = Patch(
    name="linear-cross-entropy",
    fixes=(
        "main head and every MTP depth hold logits of tokens × vocabulary, in float32 too: gigabytes for a number a token; "
        "where they are gathered over tensor-parallel ranks, the loss counts each once a rank"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/models/{gpt/gpt_model,hybrid/hybrid_model}.py and "
        "megatron/core/models/common/language_module/language_module.py; upstream's fused output layer is in neither version"
    ),
    edits=(
        _with_lazy_logits,
        Edit(
            "megatron.core.models.hybrid.hybrid_model:HybridModel.forward",
            (
                "5115982845f77289edb8590befb8a00b023e5d2ff0a84ce8099029ffddbd4194",
                "933b3efc2643550079d337aebe35ea60590d7fbada8f169700f67dda19de69dd",
            ),
            _with_lazy_logits.make,
        ),
        _lazy_output,
        _lazy_loss,
        _followed_roll,
    ),
    seam=(
        "both models, and MTP through process_mtp_loss, pass what the output layer returns to "
        "compute_language_model_loss: one pair of places for every head, whatever wraps the loss in between; "
        "only the two forward methods know whether labels are passed and what else needs logits; in a hooked checkout each is "
        "replaced when its module is imported, whether or not the other's ever is; a depth's loss mask exists nowhere but "
        "between roll_tensor and the product with the losses"
    ),
    leaves_alone=(
        "calls without labels, inference and speculative decoding, output processors, the MXFP8 and other output layers, "
        "deferred weight gradients, Megatron-FSDP, BERT and T5; the module docstring has the whole list"
    ),
    cost=(
        "a stock script's loss function that multiplies the losses by anything but the loss mask ends the run in the backward "
        "pass; each head keeps its gradients, 0.6 GB where the gain was measured, from the forward pass on"
    ),
    gain=(
        "8192 tokens × 3584 × 65,536, bf16, one H200, the weight's gradient in main_grad: 18.9 ms and 1.1 GB instead of "
        "stock's 22.3 ms and 5.4 GB (fused) or 25.2 ms and 3.2 GB; where the factor of the losses is unknown, "
        "24.2 ms and 0.6 GB"
    ),
    retire_when="megatron-core has a fused linear cross-entropy on Hopper for GPTModel, HybridModel and every MTP depth",
)
