"""A stock DSA layer and its inputs, for the tests of the DSA patches: on the CPU lane and on a GPU.

Legend: S queries, T keys, B batch, H indexer heads, D indexer width, A attention heads, K absorbed key width.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
LATENT, ROPE, HIDDEN, Q_RANK, HEADS = 16, 8, 48, 24, 4
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


def dsa() -> Any:
    """Stock's module."""
    return importlib.import_module(DSA)


def dsa_config(**overrides: Any) -> Any:
    """A small absorbed-MLA configuration with a sparse indexer loss."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "q_lora_rank": Q_RANK,
        "kv_lora_rank": LATENT, "qk_head_dim": 12, "qk_pos_emb_head_dim": ROPE, "v_head_dim": 10, "rope_type": "rope",
        "multi_latent_attention": True, "normalization": "RMSNorm", "add_bias_linear": False,
        "dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 6, "dsa_indexer_loss_coeff": 0.5,
        "dsa_indexer_use_sparse_loss": True, "dsa_indexer_rotate_activation": False, "transformer_impl": "local",
        "use_cpu_initialization": True,
    }  # fmt: skip
    return MLATransformerConfig(**(settings | overrides))


def dsa_attention(config: Any, layer_number: int = 1) -> Any:
    """Stock's DSAttention with its indexer, as an absorbed MLA layer builds it; needs process groups."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        DSAIndexer,
        DSAIndexerSubmodules,
        DSAttention,
        DSAttentionSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megacpp_mcore.layer_specs.parts import parts_for

    parts = parts_for(config)
    linear = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), parts.duplicated_linear)
    indexer = ModuleSpec(module=DSAIndexer, submodules=DSAIndexerSubmodules(k_norm=parts.norm, **linear))
    return DSAttention(
        config,
        DSAttentionSubmodules(indexer=indexer),
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=20**-0.5,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def layer_inputs(num_tokens: int, batch: int, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 leaves that require a gradient: what an absorbed MLA layer hands to DSAttention."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "query": (num_tokens, batch, HEADS, LATENT + ROPE),
        "key": (num_tokens, batch, 1, LATENT + ROPE),
        "x": (num_tokens, batch, HIDDEN),
        "qr": (num_tokens, batch, Q_RANK),
        "up_v_weight": (HEADS, 10, LATENT),
    }
    draw = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(device).requires_grad_() for name, tensor in draw.items()}


def run_layer(attention: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """DSAttention's output ``[S, B, A * V]``; causal unless ``options`` say otherwise."""
    from megatron.core.transformer.enums import AttnMaskType

    settings = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal, **options}
    return attention(value=None, **inputs, **settings)


@contextlib.contextmanager
def stock_in_double() -> Iterator[None]:
    """Stock's own code as the truth: where it asks for float32 it gets float64."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


class Recorder(TorchDispatchMode):
    """Sees every operation below autograd: names, the largest tensor made, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.largest: tuple[int, ...] = ()
        self.live_bytes = self.peak_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.add(func.name())
        before = {id_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in before | self._alive:
                self._born(tensor)
        return result

    def _born(self, tensor: torch.Tensor) -> None:
        storage, key, size = tensor.untyped_storage(), id_of(tensor), tensor.untyped_storage().nbytes()
        self._alive.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if tensor.numel() > elements(self.largest):
            self.largest = tuple(tensor.shape)

        def died() -> None:
            self._alive.discard(key)
            self.live_bytes -= size

        weakref.finalize(storage, died)


def id_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, equal for all views of it."""
    return tensor.untyped_storage()._cdata


def elements(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of this shape; 0 for ``()``, which here stands for none."""
    return torch.Size(shape).numel() if shape else 0
