"""The implementations that can be chosen: of the model's ops, and of the classes its layers are built from. No torch."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Callable
from typing import Any

from megacpp_mcore.backends.architectures import archs
from megacpp_mcore.backends.candidate import STOCK, Candidate, Speed
from megacpp_mcore.backends.probes import CUDA, TRANSFORMER_ENGINE, TRITON, ProbeResult, hopper
from megacpp_mcore.backends.support import Dim, Support
from megacpp_mcore.util import te_imports

LAYER_PARTS = "transformer_impl"
"""The op that stands for a layer's linears, norms and experts, named after Megatron's flag for it."""

EXPERTS, OWN_EXPERTS = "experts", "megacpp_mcore"
"""The op that stands for the modules of an E layer's routed experts, and its candidate that runs the op ``routed_mlp`` or
``grouped_mlp``; ``stock`` means the modules selected by ``--transformer-impl`` and ``--moe-grouped-gemm``."""

_REFERENCE = Support(capturable=False)
"""The references support everything. CUDA graphs have not been tried with them."""

_GPU_TRITON = (CUDA, TRITON)
TRITON_FP8 = "triton_fp8"
_EIGHTS = Dim(multiple_of=8)
_MLA_WIDTHS = {"qk_dim": Dim(one_of=(128,)), "v_dim": Dim(one_of=(64,))}
_WHOLE = {"window": Dim(largest=0)}

_SDPA = Support(
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    dims={"qk_dim": _EIGHTS, "v_dim": _EIGHTS},
    deterministic=False,
)
"""One of the kernels behind PyTorch's SDPA supports all such widths, masked or not; others are faster where they apply."""

_FLASH4 = Support(
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    dims=_MLA_WIDTHS | _WHOLE,
)
"""The widths at which it was compared with the reference, without a window.
Its gradients are summed in a fixed order under ``torch.use_deterministic_algorithms``."""

_TE_ATTENTION = dataclasses.replace(_SDPA, packed=False)
"""With torch's cuDNN as fast at MLA's widths 128/64 as ``sdpa``, which comes first, as it needs no Transformer Engine.
In windows the fastest (``mla_window``), by name: its probe has no window, and where it runs unfused it holds all scores."""

_MLA_TRITON = Support(devices=("cuda",), dtypes=("bfloat16", "float16"), dims=_MLA_WIDTHS)
"""The widths at which its kernels compile without register spills and were compared with the reference. Whole rows without a
window are left to ``sdpa``: cuDNN is faster at them."""

_MAMBA3_TRITON = Support(
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    dims={"head_dim": Dim(one_of=(64,)), "mimo_rank": Dim(one_of=(1, 2, 4)), "state": Dim(one_of=(64, 128))},
)
"""The sizes at which its kernels were compared with the reference, with half of the state rotated. They compile without
register spills except at rank 2, where some spill up to 88 bytes. With all of the state rotated (``rope_fraction: 1``)
some spill up to 96, at rank 1 or state 128."""

_M2RNN_TRITON = Support(
    devices=("cuda",),
    dtypes=("bfloat16",),
    dims={"key_dim": Dim(one_of=(64,)), "value_dim": Dim(one_of=(16,))},
)
"""One warp holds 16 rows of a state, whose 16 columns are a tensor core's K. Operands are split
into bf16 parts; other dtypes use the reference. Above 64 heads of a rank one kernel, of the norm, spills registers."""

_INDEXER_TRITON = Support(devices=("cuda",), dtypes=("bfloat16", "float16"), dims={"dim": Dim(one_of=(64,))})
"""The width at which its kernels compile without register spills and were compared with the reference; any number of heads."""

_INDEXER_GRAD_TRITON = dataclasses.replace(_INDEXER_TRITON, dims={"dim": Dim(one_of=(64,)), "heads": Dim(largest=64)})
"""One program holds all heads of a query in registers."""

_SPARSE_MLA_TRITON = Support(
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    dims={"qk_dim": Dim(one_of=(128, 576)), "v_dim": Dim(one_of=(64, 512))},
    combinations=({"qk_dim": 128, "v_dim": 64}, {"qk_dim": 576, "v_dim": 512}),
)
"""The widths at which its kernels compile without register spills and were compared with the reference: NAM56R's and
DeepSeek's. Any number of heads. Sums have a fixed order under ``torch.use_deterministic_algorithms``, which Megatron sets
in deterministic mode."""

_EXPERTS_TRITON = Support(
    devices=("cuda",), dtypes=("bfloat16",), dims={"hidden": _EIGHTS, "ffn": _EIGHTS, "experts": Dim(largest=256)}
)
"""PyTorch's grouped GEMM, which it calls twice, has a kernel only for bfloat16, with rows of multiples of 16 bytes."""

_EXPERTS_FP8 = dataclasses.replace(
    _EXPERTS_TRITON, dims=dict(_EXPERTS_TRITON.dims) | dict.fromkeys(("hidden", "ffn"), Dim(multiple_of=16))
)

_MAMBA3_PROJECTION_FP8 = Support(
    devices=("cuda",),
    dtypes=("bfloat16",),
    dims=dict.fromkeys(("hidden", "outputs"), Dim(multiple_of=16, largest=32768)),
)
"""``outputs`` are the rows of z, x, B and C on a rank. PyTorch's product takes multiples of 16; a program holds a whole row."""

_FEED_FORWARD_FP8 = dataclasses.replace(
    _MAMBA3_PROJECTION_FP8, dims=dict.fromkeys(("hidden", "ffn"), Dim(multiple_of=16, largest=32768))
)

_UNDIVIDED = {"expert_ranks": Dim(one_of=(1,))}
"""Of ``routed_mlp``: experts that are not divided over ranks, so that every token has as many of them here."""

_EXPERTS_QUACK = dataclasses.replace(_EXPERTS_TRITON, dims=dict(_EXPERTS_TRITON.dims) | _UNDIVIDED)

_QUACK_IS_FASTER = Support(dims={"hidden": Dim(one_of=(3584,)), "ffn": Dim(one_of=(896,)), "experts": Dim(one_of=(16,))})
"""Sizes of the rows (``routed_mlp`` in ``experiments/results/bench_h200.csv``) in which it is faster than ``triton``."""

_EXPERTS_TE = Support(devices=("cuda",), dtypes=("bfloat16", "float16", "float32"), capturable=False)
"""The host waits for the rows per expert. Float32 GEMMs run in TF32."""

_ROUTER_TRITON = Support(devices=("cuda",), dtypes=("float32",), dims={"experts": Dim(largest=256)})
"""The dtype is that of the logits, float32 in a router. One program holds all experts of a token."""

_RMS_NORM_TRITON = Support(devices=("cuda",), dtypes=("bfloat16", "float16", "float32"), dims={"hidden": Dim(largest=8192)})
"""One program holds a whole row."""

_E4M3 = ("float8_e4m3fn",)
_DEEP_GEMM = Support(devices=("cuda",), dtypes=_E4M3, dims={"inputs": Dim(multiple_of=128), "outputs": Dim(multiple_of=128)})


_MLA_PROJECTION_TRITON = Support(
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    dims=dict.fromkeys(("content_dim", "query_latent_dim", "latent_dim", "rope_dim", "v_dim", "dim"), Dim(one_of=(64,))),
)
"""The widths at which its kernels compile without register spills and were compared with the reference; any number of heads."""


def own_candidates() -> tuple[Candidate, ...]:
    """Return the implementations of the model's ops in this package; none is imported before it is chosen."""
    ops, kernel, plain = "megacpp_mcore.ops", Speed.KERNEL, Speed.REFERENCE
    return (
        _candidate("mla", "flash4", kernel, _FLASH4, f"{ops}.mla.flash4:attend", ("flash4", CUDA),
                   probe=_probe(f"{ops}.mla.flash4:probe"), auto=Support(dtypes=("bfloat16",))),  # that of its rows
        _candidate("mla", TRITON, kernel, dataclasses.replace(_MLA_TRITON, archs=archs("mla")), f"{ops}.mla.triton:attend",
                   _GPU_TRITON, beyond=Support(packed=False, deterministic=False, dims=_WHOLE)),
        _candidate("mla", "sdpa", kernel, _SDPA, f"{ops}.mla.sdpa:sdpa_attention", (CUDA,)),
        _candidate("mla", "te", kernel, _TE_ATTENTION, "megacpp_mcore.te.dot_product:attend", (CUDA, TRANSFORMER_ENGINE),
                   probe=_probe(f"{ops}.mla.flash4:probe_engine")),
        _candidate("routed_mlp", "quack", kernel, _EXPERTS_QUACK, f"{ops}.grouped_mlp.quack:routed_mlp",
                   ("quack", *_GPU_TRITON), probe=_probe(f"{ops}.grouped_mlp.quack:probe"), auto=_QUACK_IS_FASTER),
        *(
            _candidate(op, name, kernel, dataclasses.replace(support, archs=archs(op)), f"{ops}.{path}", _GPU_TRITON,
                       auto=name == TRITON)
            for op, name, support, path in (
                ("mamba3", TRITON, _MAMBA3_TRITON, "mamba3.triton:mamba3"),
                ("m2rnn", TRITON, _M2RNN_TRITON, "m2rnn.triton:m2rnn"),
                ("indexer", TRITON, _INDEXER_TRITON, "indexer.triton:select"),
                ("indexer_grad", TRITON, _INDEXER_GRAD_TRITON, "indexer.triton:indexer_grad"),
                ("sparse_mla", TRITON, _SPARSE_MLA_TRITON, "sparse_mla.triton:attend"),
                ("grouped_mlp", TRITON, _EXPERTS_TRITON, "grouped_mlp.triton:grouped_mlp"),
                ("routed_mlp", TRITON, _EXPERTS_TRITON, "grouped_mlp.triton:routed_mlp"),
                ("router", TRITON, _ROUTER_TRITON, "router.triton:route"),
                ("rms_norm", TRITON, _RMS_NORM_TRITON, "rms_norm.triton:rms_norm"),
                ("mla_latents", TRITON, _MLA_PROJECTION_TRITON, "mla_projection.triton:latents"),
                ("mla_projection", TRITON, _MLA_PROJECTION_TRITON, "mla_projection.triton:project"),
                ("mla_keys", TRITON, _MLA_PROJECTION_TRITON, "mla_projection.triton:keys_and_values"),
                ("indexer_inputs", TRITON, _MLA_PROJECTION_TRITON, "mla_projection.triton:indexer_inputs"),
                # Only by name: they need memory, and layers select them if enough is free (policy/gpu_memory.py).
                ("mamba3", "triton_keep_scan", _MAMBA3_TRITON, "mamba3.triton:mamba3_keep_scan"),
                ("mamba3", "triton_keep_all", _MAMBA3_TRITON, "mamba3.triton:mamba3_keep_all"),
            )
        ),
        # Listed before the references of the same speed class, so that ``auto`` skips those. Stock's norm is a class of the
        # layer's parts and keeps its own function: the one named here only documents it.
        _candidate("rms_norm", STOCK, plain, Support(), f"{ops}.rms_norm.reference:rms_norm"),
        _candidate("router", STOCK, plain, Support(), "megatron.core.transformer.moe.router:TopKRouter"),
        _candidate("feed_forward", STOCK, Speed.COMPILED, Support(), "megatron.core.transformer.mlp:MLP"),
        _candidate("mamba3_projection", "torch", Speed.COMPILED, Support(), f"{ops}.mamba3_projection.reference:project"),
        *(
            _candidate(op, name, kernel, support, f"{ops}.{path}", _GPU_TRITON, probe=hopper, auto=False)
            for op, name, support, path in (
                ("feed_forward", TRITON_FP8, _FEED_FORWARD_FP8, "feed_forward.triton:feed_forward"),
                ("grouped_mlp", TRITON_FP8, _EXPERTS_FP8, "grouped_mlp.fp8:grouped_mlp"),
                ("routed_mlp", TRITON_FP8, _EXPERTS_FP8, "grouped_mlp.fp8:routed_mlp"),
                ("mamba3_projection", TRITON_FP8, _MAMBA3_PROJECTION_FP8, "mamba3_projection.triton:project"),
                ("mamba3_projection", f"{TRITON_FP8}_gradient_bf16", _MAMBA3_PROJECTION_FP8,
                 "mamba3_projection.triton:project_gradient_bf16"),
            )
        ),
        *(
            _candidate(op, "te", kernel, dataclasses.replace(_EXPERTS_TE, dims=dims), f"{ops}.grouped_mlp.te:{op}",
                       (CUDA, TRANSFORMER_ENGINE), probe=functools.partial(te_imports.feature, *features), auto=False)
            for op, features, dims in (
                ("grouped_mlp", ("experts",), {}),
                ("routed_mlp", ("experts", "permute"), _UNDIVIDED),
            )
        ),
        *(
            _candidate(op, "reference", plain, _REFERENCE, f"{ops}.{package}.reference:{function}")
            for op, package, function in (
                ("mla", "mla", "mla_attention"),
                ("mla_latents", "mla_projection", "latents"),
                ("mla_projection", "mla_projection", "project"),
                ("mla_keys", "mla_projection", "keys_and_values"),
                ("indexer_inputs", "mla_projection", "indexer_inputs"),
                ("sparse_mla", "sparse_mla", "attend"),
                ("indexer", "indexer", "select"),
                ("indexer_grad", "indexer", "indexer_grad"),
                ("mamba3", "mamba3", "mamba3"),
                ("m2rnn", "m2rnn", "m2rnn"),
                ("grouped_mlp", "grouped_mlp", "grouped_mlp"),
                ("routed_mlp", "grouped_mlp", "routed_mlp"),
                ("router", "router", "route"),
                ("rms_norm", "rms_norm", "rms_norm"),
                ("feed_forward", "feed_forward", "feed_forward"),
            )
        ),
        _candidate(EXPERTS, OWN_EXPERTS, kernel, Support(), "megacpp_mcore.layer_specs.experts:own_experts"),
        _candidate(EXPERTS, STOCK, Speed.COMPILED, Support(), "megacpp_mcore.layer_specs.experts:stock_experts"),
    )  # fmt: skip


def grouped_fp8_candidates() -> tuple[Candidate, ...]:
    """Return the implementations of the grouped FP8 GEMM, which no layer of the model requests yet."""
    path, truth = "megacpp_mcore.ops.grouped_fp8", dataclasses.replace(_REFERENCE, dtypes=_E4M3)
    return (
        _candidate("grouped_fp8", "deep_gemm", Speed.KERNEL, _DEEP_GEMM, f"{path}.deep_gemm:grouped_product", (CUDA,),
                   probe=_probe(f"{path}.deep_gemm:probe")),
        _candidate("grouped_fp8", "reference", Speed.REFERENCE, truth, f"{path}.reference:grouped_product"),
    )  # fmt: skip


def linear_cross_entropy_candidates() -> tuple[Candidate, ...]:
    """Return the implementations of a reduced linear cross-entropy; the model needs the loss per token and has none."""
    op, path = "linear_cross_entropy", "megacpp_mcore.ops.linear_cross_entropy.reduced"
    liger = dataclasses.replace(_REFERENCE, devices=("cuda",), dtypes=("bfloat16", "float16", "float32"))
    quack = Support(devices=("cuda",), dtypes=("bfloat16",), dims={"hidden": _EIGHTS, "vocab": Dim(multiple_of=128)})
    return (
        _candidate(op, "chunked", Speed.KERNEL, Support(), f"{path}:chunked"),
        *(
            _candidate(op, name, Speed.KERNEL, support, f"{path}:{name}", (name, CUDA),
                       probe=_probe(f"{path}:probe", name), auto=False)
            for name, support in (("liger", liger), ("quack", quack))
        ),
    )  # fmt: skip


def layer_parts_candidates(*, transformer_engine: Callable[..., Any], local: Callable[..., Any]) -> tuple[Candidate, ...]:
    """Return the two factories for a layer's classes, named as in ``--transformer-impl``."""
    return (
        Candidate(
            name="transformer_engine",
            op=LAYER_PARTS,
            speed=Speed.KERNEL,
            load=lambda: transformer_engine,
            support=Support(devices=("cuda",)),
            requires=(TRANSFORMER_ENGINE,),
        ),
        Candidate(name="local", op=LAYER_PARTS, speed=Speed.COMPILED, load=lambda: local),
    )


def _candidate(
    op: str, name: str, speed: Speed, support: Support, path: str, requires: tuple[str, ...] = (), **more: Any
) -> Candidate:
    load = functools.partial(_load, path)
    return Candidate(name=name, op=op, speed=speed, load=load, support=support, requires=requires, **more)


def _load(path: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(path)


def _probe(path: str, *args: str) -> Callable[[], ProbeResult]:
    return lambda: _load(path)(*args)
