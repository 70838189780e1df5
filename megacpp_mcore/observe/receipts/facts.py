"""The facts of a receipt that one process can observe, read from Megatron's live objects once the model is built.

A fact that cannot be determined stays unknown, with the reason. The precision plan, the optimizer with the dtypes of its
states, the routing's settings and the compile policy are as configured; the fields of
:mod:`megacpp_mcore.observe.receipts.fields` say so. What runs is observed: which function a module calls, whose arithmetic
a class is, which dtype a bucket has. Written against megatron-core 0.19.2. No torch at import.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megacpp_mcore
from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.read import RUN
from megacpp_mcore.backends import built
from megacpp_mcore.backends.candidates import TRITON_FP8
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.model import Model, flops, precision
from megacpp_mcore.model.families import EXPERTS, FAMILIES, MAMBA
from megacpp_mcore.model.flops import utilisation as flops_report
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.receipts.fields import RESIDENT, Facts
from megacpp_mcore.policy import ALLOCATOR, COMPILED, CONNECTIONS, LaunchPolicy
from megacpp_mcore.policy.values import triton_cache
from megacpp_mcore.settings import PluginConfig
from megacpp_mcore.te.fp8_scopes import FP8
from megacpp_mcore.util import card as cards
from megacpp_mcore.util import host

COMMIT = "MEGACPP_COMMIT"
"""Names the commit where the package is not in a git checkout."""
ENVIRONMENT = (
    CONNECTIONS, ALLOCATOR, "PYTORCH_ALLOC_CONF", *host.DISABLING, "CUDA_LAUNCH_BLOCKING", "NCCL_ALGO", "NCCL_PROTO",
    "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_GRAPH_REGISTER", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4", "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "OMP_NUM_THREADS", "MEGACPP_DISABLE_TE",
)  # fmt: skip
"""The only environment variables whose values a receipt holds: none of them names a path, a person or a secret."""

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
_ARGUMENTS = {
    "parallelism.world_size": "args.world_size",
    "parallelism.tensor": "config.tensor_model_parallel_size",
    "parallelism.pipeline": "config.pipeline_model_parallel_size",
    "parallelism.virtual": "config.virtual_pipeline_model_parallel_size",
    "parallelism.expert": "config.expert_model_parallel_size",
    "parallelism.context": "config.context_parallel_size",
    "parallelism.data": "args.data_parallel_size",
    "parallelism.sequence_parallel": "config.sequence_parallel",
    "batch.micro_batch_size": "args.micro_batch_size",
    "batch.global_batch_size": "args.global_batch_size",
    "batch.sequence_length": "args.seq_length",
    "tokenizer.kind": "args.tokenizer_type",
    "tokenizer.vocab_size": "args.padded_vocab_size",
}
"""Fields that are one of Megatron's arguments or a value of the model's config."""
_OPTIMIZER = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Dtypes as configured: the states do not exist before the first step."""
_ROUTING = (
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate", "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "moe_token_drop_policy", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
)  # fmt: skip
_IN_FP8 = {
    "routed_mlp": "experts", "grouped_mlp": "experts", "mamba3_projection": "Mamba input projections",
    "feed_forward": "MTP feed-forward",
}  # fmt: skip
"""What each op computes in FP8, as named in receipts."""
_OF_MODEL = ("model", "family", "pattern", "flops", "indexer")
"""Fields that are unknown if the model's definition is."""
_KERNELS = {"triton": "*", "inductor": "fxgraph/*/*"}
"""Pattern of one entry per compiled kernel or graph in each cache, as laid out by Triton 3.6 and torch 2.11."""


def at_start(launched: LaunchPolicy) -> Facts:
    """Return the facts known before the model is built."""
    facts = Facts()
    world_size, local_size = (max(1, int(os.environ.get(name, "1"))) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    facts.put("environment", {name: os.environ[name] for name in ENVIRONMENT if name in os.environ})
    facts.attempt("versions", lambda facts: facts.put("versions", host.versions()))
    facts.attempt("commit", _commit)
    facts.put_all("parallelism", {"world_size": world_size, "hosts": max(1, world_size // local_size)})
    facts.put("compile_warmup", COMPILED["warm_up"])
    facts.put_all("compile", {name: COMPILED[name] for name in ("mode", "reason", "precompile")})
    facts.put("experimental_taxes", list(launched.taxes))
    facts.put("overlap", [dataclasses.asdict(overlap) for overlap in launched.overlaps])
    return facts


def of_model(facts: Facts, chunks: Sequence[Any], settings: PluginConfig | None, loop: Loop) -> Callable[..., None]:
    """Add to ``facts`` what the arguments of the run that ``loop`` trains and the model's chunks show.

    Returns a function that adds the FLOPs of a step to facts, given the attention pairs of its packed documents.
    """
    args, config = loop.arguments(), built.bare(chunks[0]).config
    recomputation = Recomputation.of_run(config, settings.recompute if settings is not None else None)
    facts.put("moe_enabled", config.num_moe_experts is not None)
    facts.put("recompute", str(recomputation))
    for path, learn in (
        # repeated: a checkout's Megatron has been imported only now
        ("versions", lambda facts: facts.put("versions", host.versions())),
        ("device", lambda facts: facts.put("device", _device(chunks))),
        ("parallelism", lambda facts: _arguments(facts, args, config)),
        ("data", lambda facts: _data(facts, args, loop.data_words())),
        ("precision", lambda facts: _precision(facts, chunks, config, settings)),
        ("optimizer", lambda facts: _optimizer(facts, args)),
        ("patches", lambda facts: facts.put("patches", _patches())),
        ("routing", lambda facts: _routing(facts, config)),
    ):
        facts.attempt(path, learn)
    try:
        model = _model(facts, args, config)
    except Exception as error:
        facts.miss(f"{type(error).__name__}: {error}", *_OF_MODEL)
        return lambda facts, pairs: None
    names = {"top_k": "topk", "loss_coefficient": "loss_coeff", "warmup_steps": "warmup_steps"}
    if {"F", "S"} & set(model.roles):
        facts.put_all("indexer", {name: getattr(model.dsa, value) for name, value in names.items()})
    else:
        facts.miss("the model has no sparse attention", "indexer")

    def count(facts: Facts, pairs: _Pairs = None) -> None:
        _flops(facts, pairs, model, args, config, recomputation, settings.fp8 if settings else FP8())

    facts.attempt("flops", count)
    return count


def compiled() -> Callable[[], dict[str, int]]:
    """Return a function that counts the entries of the caches at their present paths: PyTorch may change the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folders = {
        "triton": Path(os.environ.get("TRITON_CACHE_DIR") or triton_cache(os.environ.get("TRITON_HOME"))),
        "inductor": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()),
    }
    return lambda: {name: sum(1 for _ in folder.glob(_KERNELS[name])) for name, folder in folders.items()}


def _commit(facts: Facts) -> None:
    head = host.own_git("rev-parse", "HEAD")
    if head is not None and host.own_git("status", "--porcelain", "--untracked-files=no"):
        head += "+changes"
    reason = f"the package is not in a git checkout and {COMMIT} is not set; its version is {megacpp_mcore.__version__}"
    facts.put("commit", head or os.environ.get(COMMIT) or None, reason)


def _patches() -> list[dict[str, Any]]:
    from megacpp_mcore.patches.machinery import registry

    active = [record for record in registry.default().status() if record["state"] != "not applied"]
    return [{name: record[name] for name in ("name", "state", "fingerprints")} for record in active]


def _arguments(facts: Facts, args: Any, config: Any) -> None:
    """Add the layout and the batch; a size that is not set is 1, such as that of stages that are not virtual."""
    holders = SimpleNamespace(args=args, config=config)
    for path, where in _ARGUMENTS.items():
        value = attrgetter(where)(holders)
        facts.put(path, 1 if value is None and path.startswith("parallelism.") else value, f"{where} is not set")
    packed, masked = args.dataloader_inter_document_masking, args.reset_attention_mask
    facts.put("batch.documents", "packed" if packed else "masked" if masked else "together")
    facts.put("batch.accumulation", args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    facts.put("batch.rampup", args.rampup_batch_size is not None)


def _model(facts: Facts, args: Any, config: Any) -> Model:
    if lowering.preset_of(args.spec) is None:
        facts.put("pattern", getattr(args, "hybrid_layer_pattern", None))
        spec = "no spec" if not args.spec else f"the spec {'.'.join(args.spec)}"
        raise MegacppError(f"the run has {spec}, which is not this package's: what it builds is unknown here")
    model: Model = getattr(config, RUN).model
    facts.put("family", model.name.partition("_")[0].upper())
    facts.put("pattern", model.pattern)
    facts.put_all("model", {"name": model.name, "layers": model.layers, "definition": model.record()})
    facts.put("model.parameters", sum(model.parameters().values()))
    return model


def _device(chunks: Sequence[Any]) -> str:
    import torch

    return torch.cuda.get_device_name() if built.device_type(chunks) == "cuda" else f"CPU ({host.processor()})"


def _optimizer(facts: Facts, args: Any) -> None:
    dtypes = {name: str(getattr(args, name)).removeprefix("torch.") for name in _OPTIMIZER if hasattr(args, name)}
    flags = {name: bool(getattr(args, f"use_{name}_optimizer")) for name in ("distributed", "precision_aware")}
    facts.put("optimizer", {"name": args.optimizer, **flags, **dtypes})


def _precision(facts: Facts, chunks: Sequence[Any], config: Any, settings: PluginConfig | None) -> None:
    """Add the configured plan in its four fields, and the layers whose experts were built for FP8."""
    dtype = _DTYPES.get(str(config.params_dtype), str(config.params_dtype))
    if config.fp8:
        plan = precision.PrecisionPlan(model_dtype=dtype, kernel_fp8=f"megatron {config.fp8} {config.fp8_recipe}")
    elif config.quant_recipe is None:
        plan = precision.PrecisionPlan(model_dtype=dtype)
    elif precision.is_experts_recipe(config.quant_recipe):
        plan = precision.PLANS[precision.FP8_EXPERTS]
    else:
        plan = precision.PrecisionPlan(model_dtype=dtype, kernel_fp8="a precision file of the user")

    def in_fp8(kernels: str) -> precision.PrecisionPlan:  # kernels that refuse what they do not support
        before = "" if plan.kernel_fp8 == "none" else f"; {plan.kernel_fp8}"
        return dataclasses.replace(plan, kernel_fp8=f"{kernels}{before}", dispatch="refuse")

    if settings is not None and settings.fp8.recipe is not None:
        plan = in_fp8(settings.fp8.label)
        mixers = [family for family in FAMILIES.values() if family.is_mixer and family.fp8 in settings.fp8.on]
        if any(mixer.recompute in settings.recompute.on for mixer in mixers):
            plan = dataclasses.replace(plan, checkpoint_owner="transformer_engine")
    modules = [module for chunk in chunks for module in chunk.modules()]
    backends = [module.backend for module in modules if getattr(module, "backend", None) is not None]
    called = {(backend.op, backend.observed) for backend in backends}
    # A backend requested by name runs wherever the op does, in other pipeline stages too.
    called |= set(settings.backends.items()) if settings is not None else set()
    for name in sorted({f"{_IN_FP8[op]} by {name}" for op, name in called if name.startswith(TRITON_FP8)}):
        plan = in_fp8(name)
    facts.put_all("precision", dataclasses.asdict(plan))
    if plan.kernel_fp8.startswith(("megatron", "a precision file")):
        facts.put("precision.dispatch", None, "Megatron's own FP8 decides it and does not report it")
        facts.put("precision.fp8_layers", None, "Megatron's own FP8 wraps every layer")
        return
    experts = [module for module in modules if getattr(module, "in_fp8", False) and hasattr(module, "linear_fc1")]
    facts.put("precision.fp8_layers", sorted(layer.layer_number for layer in experts if layer.layer_number is not None))


def _data(facts: Facts, args: Any, data_words: Sequence[str]) -> None:
    from megacpp_mcore.data.arguments import blends
    from megacpp_mcore.data.manifest import load_manifest

    facts.put("data.fill_in_the_middle", bool(args.fim_data))
    named = blends(data_words)
    if args.mock_data or not named:
        facts.put("data.kind", "mock" if args.mock_data else None, "the run names no dataset")
        why = "mock data has no files" if args.mock_data else "the run names no dataset"
        facts.miss(why, "data.checksum", "data.datasets", "tokenizer.checksum")
        return
    facts.put("data.kind", "real")
    sums: dict[str, str | None] = {}
    tokenizers: set[str | None] = set()
    datasets = [dataset for blend in named for dataset in blend.datasets()]
    for prefix in dict.fromkeys(prefix for prefix, _ in datasets):
        try:
            manifest = load_manifest(prefix)
        except MegacppError as error:
            sums[prefix] = None
            facts.miss(str(error), "data.checksum", "tokenizer.checksum")
        else:
            sums[prefix] = manifest.files[".bin"]["sha256"]
            tokenizers.add(manifest.tokenizer["checksum"])
    rows = [{"name": Path(prefix).name, "weight": weight, "sha256": sums[prefix]} for prefix, weight in datasets]
    facts.put("data.datasets", rows)
    if None not in sums.values():
        words = [word for blend in named for word in (blend.flag, *blend.words)]
        content = [sums.get(word.strip(), word) for word in words]  # weights, and datasets by content
        facts.put("data.checksum", hashlib.sha256(json.dumps([content, args.split]).encode()).hexdigest())
        checksum = tokenizers.pop() if len(tokenizers) == 1 else None
        facts.put("tokenizer.checksum", checksum, "the datasets' manifests do not name one tokenizer")


def _routing(facts: Facts, config: Any) -> None:
    if config.num_moe_experts is None:
        facts.miss("the model has no experts", "routing")
        return
    routing = {
        "experts": config.num_moe_experts,
        "top_k": config.moe_router_topk,
        "capacity_factor": config.moe_expert_capacity_factor,
        "forced_balance": bool(config.moe_router_force_load_balancing),
        "expert_input": "padded" if config.moe_pad_expert_input_to_capacity else "jagged",
        "settings": {name: getattr(config, name) for name in _ROUTING},
    }
    facts.put_all("routing", routing, "experts have no capacity, nothing is dropped")


_Pairs = tuple[int, int, int] | None


def _flops(facts: Facts, pairs: _Pairs, model: Model, args: Any, config: Any, how: Recomputation, fp8: FP8) -> None:
    """Add the FLOPs of a step, from which the assembly derives rates; ``pairs`` are those of a step of packed documents."""
    import torch

    from megacpp_mcore.arguments.chunks import model_chunks

    if pairs is None and (documents := facts.values.get("batch.documents")) != "together":
        facts.miss(f"documents are {documents}, and their lengths are not recorded", "flops")
        return
    size: dict[str, Any] = {"seq_length": args.seq_length, "vocab_size": args.padded_vocab_size}
    step = flops.step(model, args.global_batch_size, pairs=pairs, **size)
    more_step = recomputed(model, step, how, model_chunks(config))
    dtype, kernels = facts.values["precision.model_dtype"], facts.values["precision.kernel_fp8"].split("; ")
    plan = precision.PrecisionPlan(model_dtype=dtype, kernel_fp8="experts" if "experts" in kernels else "none")
    inputs = _IN_FP8["mamba3_projection"]
    of_mtp = {"dense_ffn": f"{_IN_FP8['feed_forward']} by {TRITON_FP8}" in kernels, "mtp_projection": "mtp" in fp8.on}
    numbers = range(fp8.first + 1, model.depth - fp8.last + 1) if fp8.recipe is not None else ()
    in_fp8: dict[str, Any] = {
        "experts": model.layer_numbers(EXPERTS.letter) if f"experts by {TRITON_FP8}" in kernels else (),
        "projected": model.layer_numbers(MAMBA.letter) if any(inputs in name for name in kernels) else (),
        "gradient": f"{inputs} by {TRITON_FP8}" in kernels,
        "predicted": [name for name, is_fp8 in of_mtp.items() if is_fp8],
        "scoped": [number for number in numbers if FAMILIES[model.layers[number - 1]].fp8 in fp8.on],
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
    }
    parts, more = (flops_report.by_precision(model, work, plan, **in_fp8) for work in (step, more_step))
    by_precision = {
        name: {"model_flops": part.total.training, "hardware_flops": part.total.training + more[name].total.training}
        for name, part in parts.items()
    }
    facts.put("flops", flops_report.record(step, more_step) | {"by_precision": by_precision})


def of_objects(facts: Facts, chunks: Sequence[Any], optimizer: Any) -> None:
    """Add to ``facts`` what this rank's modules, optimizer and gradient buffers show."""
    facts.put("backends", built.backends(chunks, optimizer, {record["name"] for record in _patches()}))
    if not all(hasattr(chunk, "buffers") and hasattr(chunk, "expert_parallel_buffers") for chunk in chunks):
        reason = "gradients are not held by Megatron's DistributedDataParallel"
        facts.put_all("ddp", {"grad_reduce_dtype": None, "bucket_elements": None}, reason)
        return
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    grads = [bucket.grad_data for buffer in buffers for bucket in buffer.buckets]  # in reduction order
    facts.put("ddp.grad_reduce_dtype", sorted({str(grad.dtype).removeprefix("torch.") for grad in grads}))
    facts.put("ddp.bucket_elements", [grad.numel() for grad in grads])


def card(facts: Facts, chunks: Sequence[Any], samples: cards.Samples) -> None:
    """Add the measured rates of this process's GPU, and start sampling its clock and power."""
    if built.device_type(chunks) != "cuda":
        facts.miss("the device is a CPU", "card")
        return
    facts.values |= cards.measure()
    samples.read = cards.reader()


def memory(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return peaks of this rank so far, in bytes; the CPU lane reports the resident set.

    The allocator counts on the host: this does not wait for the device, and also works after an error.
    """
    import torch

    return {
        "memory.kind": "CUDA allocator" if built.device_type(chunks) == "cuda" else RESIDENT,
        "memory.allocated_peak_bytes": int(torch.cuda.max_memory_allocated()),
        "memory.reserved_peak_bytes": int(torch.cuda.max_memory_reserved()),
    }


def fp8() -> dict[str, Any]:
    """Return the FP8 scopes that this process has entered, and the count of dequantised tensors (None: not counted)."""
    from megacpp_mcore.te import quantized
    from megacpp_mcore.te.fp8_scopes import counts

    return {"precision.fp8_scopes": counts(), "precision.dequantised": quantized.count()}
