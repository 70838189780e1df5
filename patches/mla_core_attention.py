"""mla-core-attention: head widths that Transformer Engine cannot fuse go to cuDNN; the stock local MLA spec works.

Activate: ``megacpp_mcore.patches.apply(["mla-core-attention"])``.
Scope: ``MultiLatentAttention`` whose core attention is stock's.

* ``TEDotProductAttention``, where Transformer Engine, asked for its choice, says unfused, or FlashAttention 4 (2.20.2 gives
  4.0.0b36 a causal window with which the output is zero), and nobody asked for that (``--attention-backend`` is auto,
  ``NVTE_FUSED_ATTN`` is not 0): key and value widths differ, ``sbhd`` layout, causal or no mask. cuDNN or flash through
  PyTorch's SDPA runs instead. Stock stays, with one line in the log that says why, for packed sequences, context
  parallelism, dropout in training, windows, another softmax, FP8 attention, qk-clip, deterministic mode, split or
  batch-invariant attention, autocast, hooks on the module, and where SDPA has no kernel either.
* ``DotProductAttention`` takes ``k_channels`` and ``v_channels``, which it refused, so that ``--multi-latent-attention
  --transformer-impl local`` builds. It runs a fused SDPA kernel, or where there is none (on a CPU, say) our chunked
  reference in float32; either holds no scores of sequence × sequence. Dropout in training, windows and another softmax run
  stock's own forward. A given mask replaces the causal one, as in stock; a query that sees no key gets 0, where
  stock gives it the mean of all values.

Provenance: megatron-core 0.19.2 ``core/transformer/{multi_latent_attention,dot_product_attention}.py`` and
``core/extensions/transformer_engine.py``; Transformer Engine 2.20.2 ``pytorch/attention/dot_product_attention/utils.py``
(``get_attention_backend``).

Shape legend: S queries, T keys, B batch, H heads of this rank, K query-key width, V value width.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megacpp_mcore.backends import Speed
from megacpp_mcore.backends import observed as backends
from megacpp_mcore.errors import ModelError
from megacpp_mcore.patches.machinery.registry import Edit, Patch

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


_TE_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"


class Call(NamedTuple):
    """One call of a core attention module."""

    core: Any
    query_SBHK: torch.Tensor
    key_TBHK: torch.Tensor
    value_TBHV: torch.Tensor
    attention_mask: torch.Tensor | None
    mask_type: str


class Kept(NamedTuple):
    """Why a call stays stock's, and how loudly to say so."""

    reason: str
    level: int = logging.WARNING


def _run_fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``MultiLatentAttention._run_core_attention``."""

    @functools.wraps(original)
    def _run_core_attention(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **extra_kwargs: Any,
    ) -> Any:
        run = _runner(self.core_attention)
        if run is not None:
            mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
            call = Call(self.core_attention, query, key, value, attention_mask, mask_type.name)
            obstacle = _common_obstacle(call, packed_seq_params, extra_kwargs)
            output = run(call) if obstacle is None else Kept(obstacle)
            if not isinstance(output, Kept):
                return output
            kept = type(call.core).__name__
            _note(call, f"megatron {kept}", output.reason, Speed.COMPILED, slower=output.level >= logging.WARNING)
            _say_once(output.level, f"{kept} runs as stock: {output.reason}")
        return original(self, query, key, value, attention_mask, packed_seq_params, attn_mask_type, **extra_kwargs)

    return _run_core_attention


def _note(call: Call, observed: str, reason: str, speed: Speed, *, slower: bool = False) -> None:
    backends.note(
        "mla", observed, reason, speed=speed, layer=getattr(call.core, "layer_number", None), slower_than_best=slower
    )


def _runner(core: Any) -> Callable[[Call], torch.Tensor | Kept] | None:
    """What to run in place of ``core``, giving ``[S, B, H * V]`` or why it cannot; None for what is not stock's own."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    kind: Any = type(core)
    for stock, run in (
        (transformer_engine.TEDotProductAttention, _instead_of_te),
        (DotProductAttention, _instead_of_local),
    ):
        # Without Transformer Engine the first is no class.
        if isinstance(stock, type) and isinstance(core, stock):
            return run if kind.forward is vars(stock)["forward"] else None
    return None


def _common_obstacle(call: Call, packed_seq_params: Any, extra_kwargs: Mapping[str, Any]) -> str | None:
    """Why this call has to be stock's, whatever its core attention is; None if it need not."""
    import torch

    core, config = call.core, call.core.config
    tensors = (call.query_SBHK, call.key_TBHK, call.value_TBHV)
    if packed_seq_params is not None:
        return "the sequences are packed"
    given = sorted(name for name, value in extra_kwargs.items() if value is not None)
    if given:
        return f"it is called with {', '.join(given)}"
    if any(type(tensor) is not torch.Tensor or tensor.dim() != 4 for tensor in tensors):
        return "query, key and value are not plain tensors of four axes"
    if call.query_SBHK.shape[1:] != call.key_TBHK.shape[1:] or call.key_TBHK.shape[:3] != call.value_TBHV.shape[:3]:
        return "query, key and value do not have the same batch, heads and widths"
    if len({tensor.dtype for tensor in tensors}) > 1 or torch.is_autocast_enabled(call.query_SBHK.device.type):
        return "query, key and value have several dtypes, or autocast is on"
    if core._forward_hooks or core._forward_pre_hooks or core._backward_hooks or core._backward_pre_hooks:
        return "it has hooks"
    if "forward" in vars(core):
        return "its forward was replaced"
    if config.window_size is not None:
        return "attention has a window"
    if config.softmax_type != "vanilla":
        return f"the softmax is {config.softmax_type}"
    return None


# --- Transformer Engine -------------------------------------------------------------------------------------------------


def _instead_of_te(call: Call) -> torch.Tensor | Kept:
    """Attention by cuDNN or flash where Transformer Engine would run unfused; otherwise why not."""
    from megacpp_mcore.ops.mla import sdpa

    widths = f"{call.query_SBHK.shape[-1]}/{call.value_TBHV.shape[-1]}"
    if call.query_SBHK.shape[-1] == call.value_TBHV.shape[-1]:
        return Kept(f"the widths {widths} are equal, which Transformer Engine fuses", logging.INFO)
    obstacle = _te_obstacle(call)
    if obstacle is not None:
        return Kept(obstacle)
    stays, selected = _te_selection(_question(call))
    if stays:
        return Kept(f"at widths {widths} {selected}", logging.INFO)
    tensors, causal = call[1:4], call.mask_type == "causal"
    backend = sdpa.fused_backend(*tensors, causal=causal, backends=sdpa.FUSED[:2])
    if backend is None:
        return Kept(f"at widths {widths} neither Transformer Engine nor PyTorch's cuDNN or flash has a fused kernel")
    name = type(call.core).__name__
    _say_once(logging.INFO, f"{name} runs {backend.name} of PyTorch's SDPA: at widths {widths} {selected}")
    _note(call, f"sdpa {backend.name}", f"at widths {widths} {selected}", Speed.KERNEL)
    # Transformer Engine looks at a mask only where its type says padding or arbitrary.
    output = sdpa.sdpa_attention(*tensors, softmax_scale=call.core.softmax_scale, causal=causal, backend=backend)
    return output.flatten(2)


def _te_obstacle(call: Call) -> str | None:
    """Why a call of TEDotProductAttention has to stay there; None if Transformer Engine is to be asked."""
    from megatron.core.transformer.enums import AttnBackend

    core, config = call.core, call.core.config
    if call.mask_type not in ("causal", "no_mask"):
        return f"the mask is of type {call.mask_type}"
    if call.mask_type == "causal" and len(call.query_SBHK) != len(call.key_TBHK):
        return "causal attention has not as many queries as keys"
    if config.attention_backend != AttnBackend.auto or os.environ.get("NVTE_FUSED_ATTN", "1") == "0":
        return "the run asks for a backend (--attention-backend, NVTE_FUSED_ATTN)"
    if core.qkv_format != "sbhd" or not core.te_forward_mask_type:
        return f"the layout is {core.qkv_format}, or Transformer Engine older than 0.12"
    if config.context_parallel_size > 1 or core.cp_group is not None:
        return "context is parallel"
    if core.training and core.attention_dropout > 0:
        return f"attention dropout is {core.attention_dropout}"
    if config.fp8_dot_product_attention or config.fp8_multi_head_attention:
        return "attention is in FP8"
    if config.fp8 and config.fp8_recipe == "custom":
        return "the FP8 recipe is the user's own, and may put attention in FP8"
    if config.qk_clip or config.log_max_attention_logit:
        return "the largest logit is wanted (qk_clip, log_max_attention_logit)"
    if config.deterministic_mode or core.deterministic:
        return "the run is deterministic, which cuDNN's gradient is not"
    if core.num_splits is not None:
        return f"num_splits is {core.num_splits} (batch_invariant_mode)"
    if getattr(core, "softmax_scale", None) is None:
        return "this Transformer Engine does not tell its softmax scale"
    return None


def _question(call: Call) -> tuple[tuple[str, Any], ...]:
    """What Transformer Engine's choice of a backend for this call depends on, as its ``AttentionParams`` names it."""
    causal = call.mask_type == "causal"
    length, batch, heads, width = call.query_SBHK.shape
    graph = importlib.import_module("transformer_engine.pytorch.graph")
    return (
        ("qkv_dtype", call.query_SBHK.dtype),
        # Three tensors of two widths cannot be views of one packed buffer.
        ("qkv_layout", "sbhd_sbhd_sbhd"),
        ("batch_size", batch),
        ("num_heads", heads),
        ("num_gqa_groups", heads),
        ("max_seqlen_q", length),
        ("max_seqlen_kv", len(call.key_TBHK)),
        ("head_dim_qk", width),
        ("head_dim_v", call.value_TBHV.shape[-1]),
        ("attn_mask_type", call.mask_type),
        ("window_size", (-1, 0 if causal else -1)),
        ("bottom_right_diagonal", not causal),
        ("core_attention_bias_requires_grad", False),
        ("attention_dropout", call.core.attention_dropout),
        ("is_training", call.core.training),
        ("softmax_scale", call.core.softmax_scale),
        ("cuda_graph", graph.is_graph_capturing()),
    )


@functools.lru_cache(maxsize=256)
def _te_selection(question: tuple[tuple[str, Any], ...]) -> tuple[bool, str]:
    """Whether Transformer Engine's core attention stays, and what it selects or why it cannot be asked."""
    try:
        utils = importlib.import_module(_TE_UTILS)
    except ImportError as error:
        return True, f"this Transformer Engine cannot be asked for its backend: {error}"
    known = {field.name for field in dataclasses.fields(utils.AttentionParams)}
    answer = utils.get_attention_backend(utils.AttentionParams(**{k: v for k, v in question if k in known}))
    if len(answer) != 6:
        return (
            True,
            f"this Transformer Engine answers with {len(answer)} values when asked for its backend; 6 are expected",
        )
    flash, flash_version, fused, _, unfused, _ = answer
    if unfused:
        return False, "Transformer Engine is unfused"
    if flash and str(flash_version).startswith("4."):
        return False, "Transformer Engine selects FlashAttention 4, which takes its causal window for an empty one"
    return True, f"Transformer Engine selects its {'flash' if flash else 'fused' if fused else 'no'} backend"


# --- the local implementation -------------------------------------------------------------------------------------------


def _with_widths(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``DotProductAttention.__init__``, which knows one width for query, key and value."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        if k_channels is None and v_channels is None:
            original(self, *args, **kwargs)
            return
        if k_channels is None or v_channels is None:
            raise ModelError(
                f"DotProductAttention got k_channels={k_channels} and v_channels={v_channels}, expected both or neither"
            )
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("softmax_scale") is None:
            bound.arguments["softmax_scale"] = k_channels**-0.5
        original(*bound.args, **bound.kwargs)
        self.hidden_size_per_attention_head = k_channels
        # What the forward method gives its output, and nothing else: H · V.
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return __init__


def _instead_of_local(call: Call) -> torch.Tensor | Kept:
    """Attention without scores of S × T by SDPA or the chunked reference; otherwise why stock's forward has to run."""
    from megacpp_mcore.ops.mla import sdpa
    from megacpp_mcore.ops.mla.reference import mla_attention

    core, mask, tensors = call.core, call.attention_mask, call[1:4]
    if core.training and core.attention_dropout.p > 0:
        return Kept(f"attention dropout is {core.attention_dropout.p}")
    # As in FusedScaleMaskSoftmax: a mask that is given is the whole mask, whatever the type.
    causal = mask is None and core.attn_mask_type.name == "causal" and len(call.query_SBHK) > 1
    if causal and len(call.query_SBHK) != len(call.key_TBHK):
        return Kept("causal attention has not as many queries as keys")
    # With apply_query_key_layer_scaling stock divides the one factor by the layer's number and multiplies the other by it.
    scale = core.softmax_scale * (core.scale_mask_softmax.scale or 1)
    deterministic = core.config.deterministic_mode
    backend = sdpa.fused_backend(
        *tensors, attention_mask=mask, causal=causal, backends=sdpa.FUSED, deterministic=deterministic
    )
    name = type(core).__name__
    if backend is None:
        _say_once(
            logging.INFO, f"{name} runs the chunked reference in float32: PyTorch's SDPA has no fused kernel here"
        )
        # On a CPU there is nothing faster to be passed over.
        slower = call.query_SBHK.is_cuda
        _note(call, "reference", "PyTorch's SDPA has no fused kernel here", Speed.REFERENCE, slower=slower)
        output = mla_attention(*tensors, softmax_scale=scale, attention_mask=mask, causal=causal)
    else:
        _say_once(logging.INFO, f"{name} runs {backend.name} of PyTorch's SDPA")
        _note(call, f"sdpa {backend.name}", "Megatron's local core attention", Speed.KERNEL)
        output = sdpa.sdpa_attention(*tensors, softmax_scale=scale, attention_mask=mask, causal=causal, backend=backend)
    return output.flatten(2)


@functools.cache
def _say_once(level: int, message: str) -> None:
    from megatron.core.utils import log_single_rank

    log_single_rank(logger, level, f"mla-core-attention: {message}")


PATCH = Patch(
    name="mla-core-attention",
    fixes=(
        "MLA widths that Transformer Engine cannot fuse (128/64 on Hopper) run unfused without a word, with every score in "
        "memory; the local MLA spec cannot be built"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/transformer/{multi_latent_attention,dot_product_attention}.py; "
        "Transformer Engine 2.20.2, get_attention_backend"
    ),
    megatron_versions=">=0.19,<0.20",
    edits=(
        Edit.of(
            "megatron.core.transformer.multi_latent_attention:MultiLatentAttention._run_core_attention",
            "157911d9c9458347c8bbe81bbe7f3ce6187773d56517ed9f308df862ef8b362c",
            _run_fused,
        ),
        Edit.of(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            "1081aca9a2f35290f40a42d663188b5e677e3f910981d8fd0151264975262f3a",
            _with_widths,
        ),
    ),
    seam=(
        "the one place from which full MLA, recomputed or not, calls either core attention; TEDotProductAttention.forward "
        "would be narrower, but is no symbol where Transformer Engine is not installed, and the local half must apply there"
    ),
    leaves_alone=(
        "attention that is not latent, absorbed MLA and DSA, dynamic-batching inference, core attention modules that are "
        "not stock's own, widths that Transformer Engine fuses; the module docstring has the whole list"
    ),
    cost=(
        "another order of summation; without a fused kernel (on a CPU) the chunked reference recomputes in float32, which "
        "takes longer than stock"
    ),
    gain=(
        "56 heads, 128/64, B 2 × S 4096, bf16, one H200: forward + backward 3.4 ms instead of 16.0 ms (Transformer Engine) or "
        "54.5 ms (local); peak 0.59 GB instead of 11.4 or 30.2 GB"
    ),
    retire_when="Transformer Engine fuses 128/64 on Hopper, and DotProductAttention takes k_channels and v_channels",
)
