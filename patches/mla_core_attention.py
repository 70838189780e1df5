"""mla-core-attention: where Transformer Engine is unfused, MLA runs on cuDNN or flash; stock's local MLA spec works.

Activate: ``megacpp_mcore.patches.apply(["mla-core-attention"])``.
Scope: ``MultiLatentAttention`` with stock core attention.

* ``TEDotProductAttention``, if Transformer Engine would select its unfused backend or FlashAttention 4, and the run has not
  requested a backend (``--attention-backend`` is auto, ``NVTE_FUSED_ATTN`` is not 0). Key and value dims differ; the layout is
  ``sbhd`` with a causal or no mask, or ``thd`` with causal packed sequences. The op's call of FlashAttention 4 runs, where it
  is installed and supports the dims; otherwise cuDNN or flash through PyTorch. Stock stays, and the reason is logged once, for
  context parallelism, dropout in training, windows, another softmax, FP8 attention, qk-clip, deterministic mode, split or
  batch-invariant attention, autocast, hooks on the module, and if PyTorch has no kernel either; with packed sequences also for
  padding between them, an additional mask, and keys with their own ``cu_seqlens``. There, too, Transformer Engine's own call of
  FlashAttention 4, in which 2.20.2 passes 4.0.0b36 a causal window that makes the output zero, is off from the patch's first
  call: it sets ``NVTE_FLASH_ATTN_V4=0`` in the process, if that is not set.
* ``DotProductAttention`` accepts ``k_channels`` and ``v_channels``, which stock refuses, so that ``--multi-latent-attention
  --transformer-impl local`` builds, and packed sequences. It runs a fused SDPA kernel or, without one (on a CPU, say), our
  chunked reference in float32; neither stores sequence × sequence scores. Dropout in training, windows and another softmax run
  the stock forward. A mask that is passed replaces the causal one, as in stock; a query without visible keys gets 0, where
  stock returns the mean of all values.

Packed sequences are read on the device, once per micro-batch for all layers. Rows after the last one attend to one another.

Provenance: megatron-core 0.19.2 ``core/transformer/{multi_latent_attention,dot_product_attention}.py`` and
``core/extensions/transformer_engine.py``; Transformer Engine 2.20.2 ``pytorch/attention/dot_product_attention/utils.py``
(``get_attention_backend``) and ``dot_product_attention.py`` next to it (``forward``).

Shape legend: S queries, T keys, B batch, H heads of this rank, K query/key head dim, V value head dim.
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

from megacpp_mcore.backends import Dispatcher, Speed, observed, vendor_switches
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


_TE_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"


class Call(NamedTuple):
    """One call of a core attention module: tensors ``[S, B, H, ·]``, or ``[S, H, ·]`` of packed sequences."""

    core: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attention_mask: torch.Tensor | None
    mask_type: str
    packed: Any = None
    """Megatron's ``PackedSeqParams``, or None."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Query, key and value in the op's layout: packed sequences become a batch of one."""
        qkv = (self.query, self.key, self.value)
        return qkv if self.packed is None else tuple(tensor.unsqueeze(1) for tensor in qkv)

    def documents(self) -> dict[str, Any]:
        """Return the op's arguments that separate packed sequences; rows after the last sequence form one more."""
        from megacpp_mcore.ops.packed.documents import seq_idx_from_cu_seqlens, shared

        if self.packed is None:
            return {}
        starts, rows = self.packed.cu_seqlens_q, len(self.query)
        seq_idx = shared(starts, ("sequences", rows), lambda: seq_idx_from_cu_seqlens(starts, rows))
        return {"seq_idx": seq_idx, "max_documents": starts.numel()}


class Kept(NamedTuple):
    """Why stock runs a call, and the log level of that reason."""

    reason: str
    level: int = logging.WARNING


@edit(
    "megatron.core.transformer.multi_latent_attention:MultiLatentAttention._run_core_attention",
    "157911d9c9458347c8bbe81bbe7f3ce6187773d56517ed9f308df862ef8b362c",
)
def _run_fused(
    original: Function,
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
        os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        call = Call(self.core_attention, query, key, value, attention_mask, mask_type.name, packed_seq_params)
        obstacle = _common_obstacle(call, extra_kwargs)
        output = run(call) if obstacle is None else Kept(obstacle)
        if not isinstance(output, Kept):
            return output.flatten(2)
        _report(call, None, output.reason, Speed.COMPILED, output.level)
    return original(self, query, key, value, attention_mask, packed_seq_params, attn_mask_type, **extra_kwargs)


def _report(call: Call, backend: str | None, reason: str, speed: Speed, level: int = logging.INFO) -> None:
    """Log and record once which ``backend`` (None: stock) runs and why; a warning marks one that is slower than necessary."""
    core = type(call.core).__name__
    _log_once(level, f"{core} runs {'as stock' if backend is None else backend}: {reason}")
    layer, slower = getattr(call.core, "layer_number", None), level >= logging.WARNING
    observed.note("mla", backend or f"megatron {core}", reason, speed=speed, layer=layer, slower_than_best=slower)


@functools.cache
def _log_once(level: int, message: str) -> None:
    from megatron.core.utils import log_single_rank

    log_single_rank(logger, level, f"mla-core-attention: {message}")


def _runner(core: Any) -> Callable[[Call], torch.Tensor | Kept] | None:
    """Return the function to run instead of ``core``, giving ``[S, B, H, V]`` or why not; None if ``core`` is not stock."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    kind: Any = type(core)
    for stock, run in (
        (transformer_engine.TEDotProductAttention, _instead_of_te),
        (DotProductAttention, _instead_of_local),
    ):
        # Without Transformer Engine the first one is not a class.
        if isinstance(stock, type) and isinstance(core, stock):
            return run if kind.forward is vars(stock)["forward"] else None
    return None


def _common_obstacle(call: Call, extra_kwargs: Mapping[str, Any]) -> str | None:
    """Why stock has to run this call, with either core attention; None if it does not."""
    import torch

    core, config, axes = call.core, call.core.config, 4 if call.packed is None else 3
    tensors = (call.query, call.key, call.value)
    extras = sorted(name for name, value in extra_kwargs.items() if value is not None)
    if extras:
        return f"it is called with {', '.join(extras)}"
    if call.packed is not None and (obstacle := _packed_obstacle(call, call.packed)) is not None:
        return obstacle
    if any(type(tensor) is not torch.Tensor or tensor.dim() != axes for tensor in tensors):
        return f"query, key and value are not plain tensors of {axes} axes"
    if call.query.shape[1:] != call.key.shape[1:] or call.key.shape[:-1] != call.value.shape[:-1]:
        return "query, key and value do not have the same batch, heads and widths"
    if len({tensor.dtype for tensor in tensors}) > 1 or torch.is_autocast_enabled(call.query.device.type):
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


def _packed_obstacle(call: Call, packed: Any) -> str | None:
    """Why stock has to run packed sequences; None if they are causal and ``cu_seqlens_q`` fully describes them."""
    if packed.qkv_format != "thd" or call.attention_mask is not None:
        return f"the sequences are packed as {packed.qkv_format}, or also have a mask"
    starts, padded = packed.cu_seqlens_q, (packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    if starts is None or packed.cu_seqlens_kv is not starts:
        return "cu_seqlens_kv differs from cu_seqlens_q"
    # Transformer Engine's rule if pad_between_seqs is None.
    dense = all(offsets is None for offsets in padded) or all(offsets is starts for offsets in padded)
    if packed.pad_between_seqs or (packed.pad_between_seqs is None and not dense):
        return "there is padding between packed sequences"
    if packed.cp_group is not None or packed.local_cp_size is not None:
        return "context parallelism is on"
    if call.mask_type not in ("causal", "padding_causal"):
        return f"packed sequences have a mask of type {call.mask_type}"
    return None


def _instead_of_te(call: Call) -> torch.Tensor | Kept:
    """Attention by the op's kernels if Transformer Engine would run unfused or FlashAttention 4; otherwise why not."""
    from megacpp_mcore.ops.mla import sdpa

    K, V = call.query.shape[-1], call.value.shape[-1]
    if K == V:
        return Kept(f"the widths {K}/{V} are equal, which Transformer Engine fuses", logging.INFO)
    obstacle = _te_obstacle(call)
    if obstacle is not None:
        return Kept(obstacle)
    where = f"at widths {K}/{V}" if call.packed is None else f"at widths {K}/{V}, packed,"
    replaced, words = _te_selection(_question(call))
    if not replaced:
        return Kept(f"{where} {words}", logging.INFO)
    # Transformer Engine reads a mask only if its type is padding or arbitrary.
    tensors, causal, documents = call.tensors(), call.mask_type != "no_mask", call.documents()
    attend = _flash4(K, V, call.query.dtype) if vendor_switches.allowed("flash4").ok else None
    kernel = "flash4"
    if attend is None:
        backend = sdpa.fused_backend(*tensors, causal=causal, seq_idx=documents.get("seq_idx"), backends=sdpa.FUSED[:2])
        if backend is None:
            return Kept(f"{where} neither Transformer Engine nor PyTorch's cuDNN or flash has a fused kernel")
        attend, kernel = functools.partial(sdpa.sdpa_attention, backend=backend), f"sdpa {backend.name}"
    _report(call, kernel, f"{where} {words}", Speed.KERNEL)
    return attend(*tensors, softmax_scale=call.core.softmax_scale, causal=causal, **documents)


@functools.cache
def _flash4(qk_dim: int, v_dim: int, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """FlashAttention-4 as called by the op ``mla``, or None if it is not installed or does not support this call."""
    needs: dict[str, Any] = {"qk_dim": qk_dim, "v_dim": v_dim, "dtype": dtype, "device": "cuda"}
    try:
        return Dispatcher({"mla": "flash4"}).request("mla", **needs).fn
    except BackendError:
        return None


def _te_obstacle(call: Call) -> str | None:
    """Why a call of TEDotProductAttention has to stay there; None if Transformer Engine's choice decides."""
    from megatron.core.transformer.enums import AttnBackend

    core, config = call.core, call.core.config
    if call.packed is None and call.mask_type not in ("causal", "no_mask"):
        return f"the mask is of type {call.mask_type}"
    if call.mask_type != "no_mask" and len(call.query) != len(call.key):
        return "causal attention has different numbers of queries and keys"
    if config.attention_backend != AttnBackend.auto or os.environ.get("NVTE_FUSED_ATTN", "1") == "0":
        return "the run requests a backend (--attention-backend, NVTE_FUSED_ATTN)"
    if core.qkv_format != "sbhd" or not core.te_forward_mask_type:
        return f"the layout is {core.qkv_format}, or Transformer Engine older than 0.12"
    if config.context_parallel_size > 1 or core.cp_group is not None:
        return "context parallelism is on"
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
    """Return the fields of ``AttentionParams`` on which Transformer Engine's backend choice for this call depends."""
    query, key, value = call.tensors()
    length, batch, heads, width = query.shape
    causal = call.mask_type != "no_mask"
    graph = importlib.import_module("transformer_engine.pytorch.graph")
    questions = {
        "qkv_dtype": query.dtype,
        # Three tensors with two different widths cannot be views of one packed buffer.
        "qkv_layout": "sbhd_sbhd_sbhd",
        "batch_size": batch,
        "num_heads": heads,
        "num_gqa_groups": heads,
        "max_seqlen_q": length,
        "max_seqlen_kv": len(key),
        "head_dim_qk": width,
        "head_dim_v": value.shape[-1],
        "attn_mask_type": call.mask_type,
        "window_size": (-1, 0 if causal else -1),
        "bottom_right_diagonal": not causal,
        "core_attention_bias_requires_grad": False,
        "attention_dropout": call.core.attention_dropout,
        "is_training": call.core.training,
        "softmax_scale": call.core.softmax_scale,
        "cuda_graph": graph.is_graph_capturing(),
    }
    if call.packed is not None:
        longest = call.packed.max_seqlen_q if isinstance(call.packed.max_seqlen_q, int) else length
        # Rounded: lengths differ between batches, and for each query Transformer Engine lets cuDNN build a graph.
        sequences, longest, tokens = map(_power_of_two, (call.packed.cu_seqlens_q.numel() - 1, longest, length))
        variant = call.core.config.experimental_attention_variant
        questions |= {
            "qkv_layout": "thd_thd_thd",
            "batch_size": sequences,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
            "num_tokens_q": tokens,
            "num_tokens_kv": tokens,
            "head_dim_v": width if variant is None else value.shape[-1],  # stock pads the values
            "attn_mask_type": "padding_causal",
        }
    return tuple(questions.items())


def _power_of_two(least: int) -> int:
    """Return the smallest power of two >= ``least``, which is at least 1."""
    return 1 << (least - 1).bit_length()


@functools.lru_cache(maxsize=256)
def _te_selection(question: tuple[tuple[str, Any], ...]) -> tuple[bool, str]:
    """Return whether Transformer Engine's choice is to be replaced, and in words what it is or why it cannot be queried."""
    try:
        utils = importlib.import_module(_TE_UTILS)
    except ImportError as error:
        return False, f"this Transformer Engine cannot be asked for its backend: {error}"
    fields = {field.name for field in dataclasses.fields(utils.AttentionParams)}
    answer = utils.get_attention_backend(utils.AttentionParams(**{k: v for k, v in question if k in fields}))
    if len(answer) != 6:
        words = f"this Transformer Engine answers with {len(answer)} values when asked for its backend; 6 are expected"
        return False, words
    flash, flash_version, fused, _, unfused, _ = answer
    if unfused:
        return True, "Transformer Engine is unfused"
    if flash and str(flash_version).startswith("4."):  # NVTE_FLASH_ATTN_V4 was set to 1
        return True, "Transformer Engine selects FlashAttention 4, which takes its causal window for an empty one"
    return False, f"Transformer Engine selects its {'flash' if flash else 'fused' if fused else 'no'} backend"


@edit(
    "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
    "1081aca9a2f35290f40a42d663188b5e677e3f910981d8fd0151264975262f3a",
)
def _with_widths(
    original: Function,
    self: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Replace ``DotProductAttention.__init__``, which supports only one width for query, key and value."""
    if k_channels is None and v_channels is None:
        original(self, *args, **kwargs)
        return
    if k_channels is None or v_channels is None:
        raise ModelError(
            f"DotProductAttention got k_channels={k_channels} and v_channels={v_channels}, expected both or neither"
        )
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if bound.arguments.get("softmax_scale") is None:
        bound.arguments["softmax_scale"] = k_channels**-0.5
    original(*bound.args, **bound.kwargs)
    self.hidden_size_per_attention_head = k_channels
    # Used only for the width of the forward method's output: H · V.
    self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _instead_of_local(call: Call) -> torch.Tensor | Kept:
    """Attention without S × T scores, by SDPA or the chunked reference; otherwise why the stock forward has to run."""
    from megacpp_mcore.ops.mla import sdpa
    from megacpp_mcore.ops.mla.reference import mla_attention

    core, mask, tensors = call.core, call.attention_mask, call.tensors()
    if core.training and core.attention_dropout.p > 0:
        return Kept(f"attention dropout is {core.attention_dropout.p}")
    # As in FusedScaleMaskSoftmax: a mask that is passed is the whole mask, whatever its type.
    causal = mask is None and core.attn_mask_type.name == "causal" and len(call.query) > 1
    causal = causal or call.packed is not None
    if causal and len(call.query) != len(call.key):
        return Kept("causal attention has different numbers of queries and keys")
    # With apply_query_key_layer_scaling stock divides the one factor by the layer's number and multiplies the other by it.
    scale = core.softmax_scale * (core.scale_mask_softmax.scale or 1)
    documents, deterministic = call.documents(), core.config.deterministic_mode
    how: dict[str, Any] = {"attention_mask": mask, "causal": causal}
    backend = sdpa.fused_backend(
        *tensors, seq_idx=documents.get("seq_idx"), backends=sdpa.FUSED, deterministic=deterministic, **how
    )
    how |= {"softmax_scale": scale, **documents}
    if backend is None:
        # On a CPU there is no faster alternative.
        level = logging.WARNING if call.query.is_cuda else logging.INFO
        _report(call, "reference", "PyTorch's SDPA has no fused kernel here", Speed.REFERENCE, level)
        return mla_attention(*tensors, **how)
    _report(call, f"sdpa {backend.name}", "Megatron's local core attention holds every score", Speed.KERNEL)
    return sdpa.sdpa_attention(*tensors, backend=backend, **how)


PATCH = Patch(
    name="mla-core-attention",
    fixes=(
        "where Transformer Engine has no fused kernel for an MLA's widths, or has loaded another cuDNN than torch's, "
        "attention, packed or not, silently runs unfused, with every score in memory; the local MLA spec cannot be "
        "built, and its core attention takes no packed sequences"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/transformer/{multi_latent_attention,dot_product_attention}.py; "
        "Transformer Engine 2.20.2, get_attention_backend"
    ),
    edits=(_run_fused, _with_widths),
    seam=(
        "the one place from which full MLA, recomputed or not, calls either core attention; TEDotProductAttention.forward "
        "would be narrower, but is not a symbol where Transformer Engine is not installed, and the local half must apply there"
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
        "56 heads, 128/64, B 2 × S 4096, bf16, one H200: forward + backward 3.3 ms and 0.59 GB, as Transformer Engine with "
        "torch's cuDNN 9.19 takes itself; where it is unfused, 15.7 ms and 11.4 GB"
    ),
    retire_when="Transformer Engine says that it runs unfused, and DotProductAttention takes k_channels and v_channels",
)
