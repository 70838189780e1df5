"""What a process knows of its run, read from Megatron's live objects when the model stands; the facts of a receipt.

A fact that cannot be had is left unknown with the reason. The precision plan, the optimizer with the dtypes of its states, the
routing's settings and the compile policy are as configured, and the fields of :mod:`megacpp_mcore.observe.receipts.schema` say
so. Written against megatron-core 0.19.2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore import lowering, precision
from megacpp_mcore.config import PluginConfig
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.model import Model
from megacpp_mcore.observe import flops
from megacpp_mcore.observe.flops import report as flops_report
from megacpp_mcore.observe.flops.recompute import Recomputation, recomputed
from megacpp_mcore.observe.loop import Loop
from megacpp_mcore.observe.receipts.backends import bare
from megacpp_mcore.observe.receipts.modules import modules
from megacpp_mcore.policy import ALLOCATOR, CONNECTIONS, DISABLING, LaunchPolicy

ENVIRONMENT = (
    CONNECTIONS,
    ALLOCATOR,
    "PYTORCH_ALLOC_CONF",
    *DISABLING,
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_GRAPH_REGISTER",
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "OMP_NUM_THREADS",
    "MEGACPP_DISABLE_TE",
    "MEGACPP_COMMIT",
)
"""The only environment variables whose values a receipt holds: none of them names a path, a person or a secret."""

COMMIT = "MEGACPP_COMMIT"
"""Names the commit where the package does not lie in a git checkout."""

_DISTRIBUTIONS = (
    "megatron-core",
    "torch",
    "transformer-engine",
    "triton",
    "mamba-ssm",
    "tilelang",
    "flash-attn",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


@dataclass
class Facts:
    """Values by the path of their field, and why others are not known."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, reason: str = "") -> None:
        """Note a value, or why it is null."""
        self.values[path] = value
        if value is None:
            self.unknown[path] = reason

    def miss(self, path: str, reason: str) -> None:
        """Note why a field, or all of a group, is not known."""
        self.unknown[path] = reason

    def attempt(self, path: str, learn: Callable[[Facts], None]) -> None:
        """Let ``learn`` fill ``path``; observing must not end a run, so that an error is the reason for not knowing."""
        try:
            learn(self)
        except Exception as error:
            self.miss(path, f"{type(error).__name__}: {error}")


def at_start(settings: PluginConfig | None, launched: LaunchPolicy | None) -> Facts:
    """What is known before there is a model."""
    facts = Facts()
    facts.put("environment", {name: os.environ[name] for name in ENVIRONMENT if name in os.environ})
    facts.attempt("versions", lambda found: found.put("versions", _versions()))
    facts.attempt("commit", _commit)
    facts.attempt("compile", lambda found: _compile(found, settings, launched))
    if launched is None:
        facts.miss("experimental_taxes", "the launcher did not start this run, and only it brings them")
        facts.miss("overlap", "the launcher did not start this run, and its policy is not known")
    else:
        facts.put("experimental_taxes", list(launched.taxes))
        facts.put("overlap", [dataclasses.asdict(each) for each in launched.overlaps])
    facts.put("parallelism.world_size", int(os.environ.get("WORLD_SIZE", "1")))
    facts.put(
        "parallelism.hosts",
        max(1, int(os.environ.get("WORLD_SIZE", "1")) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))),
    )
    return facts


def of_model(facts: Facts, chunks: Sequence[Any], settings: PluginConfig | None, loop: Loop) -> None:
    """Add to ``facts`` what the arguments of the run that ``loop`` trains and the model's chunks say."""
    args = loop.arguments()
    config = bare(chunks[0]).config
    model: list[Model] = []
    facts.attempt("model", lambda found: model.append(_model(found, args, config, settings, loop)))
    for path, learn in (
        ("device", lambda found: _device(found, chunks)),
        ("parallelism", lambda found: _parallelism(found, args, config)),
        ("batch", lambda found: _batch(found, args)),
        ("data", lambda found: _data(found, args)),
        ("precision", lambda found: _precision(found, chunks, config)),
        ("optimizer", lambda found: found.put("optimizer", _optimizer(args))),
        ("patches", lambda found: found.put("patches", _patches())),
        ("routing", lambda found: _routing(found, chunks, config)),
    ):
        facts.attempt(path, learn)
    facts.attempt("recompute", lambda found: found.put("recompute", str(_recomputation(config, settings))))
    if not model:
        for path in ("family", "pattern", "flops", "indexer"):
            if facts.values.get(path) is None:
                facts.miss(path, facts.unknown["model"])
    else:
        facts.attempt("indexer", lambda found: _indexer(found, model[0]))
        facts.attempt("flops", lambda found: _flops(found, model[0], args, config, settings))


def cache_files() -> dict[str, int]:
    """How many files the caches of compiled kernels hold; places as Triton 3.6 and torch 2.11 choose them."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    home = Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"
    folders = {
        "triton": os.environ.get("TRITON_CACHE_DIR") or home,
        "inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),
    }
    return {name: sum(len(names) for _, _, names in os.walk(folder)) for name, folder in folders.items()}


# --- The software -----------------------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    import torch

    found = {"megacpp-mcore": megacpp_mcore.__version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    package = sys.modules.get("megatron.core.package_info")
    if package is not None:  # a checkout's, where one comes first on the path
        found["megatron-core"] = package.__version__
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _commit(facts: Facts) -> None:
    root = Path(megacpp_mcore.__file__).resolve().parent
    own = _git(root, "ls-files", "--error-unmatch", "__init__.py") is not None
    head = _git(root, "rev-parse", "HEAD") if own else None
    if head is not None:
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        facts.put("commit", head + ("+changes" if changed else ""))
        return
    reason = f"the package lies in no git checkout and {COMMIT} is not set; its version is {megacpp_mcore.__version__}"
    facts.put("commit", os.environ.get(COMMIT) or None, reason)


def _git(folder: Path, *words: str) -> str | None:
    """What git says in ``folder``; None if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _compile(facts: Facts, settings: PluginConfig | None, launched: LaunchPolicy | None) -> None:
    if launched is None:
        facts.put("compile.mode", settings.compile if settings is not None else "off")
        for path in ("compile_warmup", "compile.reason", "compile.precompile"):
            facts.miss(path, "the launcher did not start this run, and its policy is not known")
        return
    chosen = launched.compile
    facts.put("compile_warmup", chosen.warm_up)
    facts.put("compile.mode", chosen.mode)
    facts.put("compile.reason", chosen.reason)
    facts.put("compile.precompile", chosen.precompile)


def _patches() -> list[dict[str, Any]]:
    from megacpp_mcore.patches import registry

    return [
        {name: record[name] for name in ("name", "state", "fingerprints")}
        for record in registry.default().status()
        if record["state"] != "not applied"
    ]


# --- The run ----------------------------------------------------------------------------------------------------------


def _model(facts: Facts, args: Any, config: Any, settings: PluginConfig | None, loop: Loop) -> Model:
    """The model's definition, where the run's spec is one of ours."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    facts.put("moe_enabled", config.num_moe_experts is not None)
    host = lowering.host_of(args.spec)
    if host is None:
        spec = "no spec" if not args.spec else f"the spec {'.'.join(args.spec)}"
        reason = f"the run has {spec}, none of this package: what it builds is not known here"
        facts.put("pattern", pattern, reason)
        raise MegacppError(reason)
    if settings is not None:
        found = settings.model
    else:
        found = lowering.matching_preset(loop.describe_model(host), host=host)
    facts.put("family", found.name.partition("_")[0].upper())
    facts.put("pattern", found.pattern)
    facts.put("model.name", found.name)
    facts.put("model.layers", found.layers)
    facts.put("model.parameters", sum(found.parameters().values()))
    facts.put("model.definition", dataclasses.asdict(found))
    return found


def _device(facts: Facts, chunks: Sequence[Any]) -> None:
    import torch

    kind = next(bare(chunks[0]).parameters()).device.type
    mode = facts.values.get("compile.mode", "off")
    facts.put("device", torch.cuda.get_device_name() if kind == "cuda" else f"CPU ({_processor()})")
    facts.put("lane", f"{kind}_{'regional_compile' if mode == 'regional' else 'eager'}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _parallelism(facts: Facts, args: Any, config: Any) -> None:
    for name, value in {
        "world_size": args.world_size,
        "tensor": config.tensor_model_parallel_size,
        "pipeline": config.pipeline_model_parallel_size,
        "virtual": config.virtual_pipeline_model_parallel_size or 1,
        "expert": config.expert_model_parallel_size,
        "context": config.context_parallel_size,
        "data": args.data_parallel_size,
        "sequence_parallel": bool(config.sequence_parallel),
    }.items():
        facts.put(f"parallelism.{name}", value)


def _batch(facts: Facts, args: Any) -> None:
    documents = (
        "packed" if args.dataloader_inter_document_masking else "masked" if args.reset_attention_mask else "together"
    )
    for name, value in {
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "accumulation": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        "sequence_length": args.seq_length,
        "documents": documents,
        "rampup": args.rampup_batch_size is not None,
    }.items():
        facts.put(f"batch.{name}", value)


def _optimizer(args: Any) -> dict[str, Any]:
    """The optimizer as configured; its states do not exist before the first step."""
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    found = {name: str(getattr(args, name)).removeprefix("torch.") for name in names if hasattr(args, name)}
    return {
        "name": args.optimizer,
        "distributed": bool(args.use_distributed_optimizer),
        "precision_aware": bool(args.use_precision_aware_optimizer),
        **found,
    }


def _precision(facts: Facts, chunks: Sequence[Any], config: Any) -> None:
    """The configured plan in its four fields, and the layers whose experts were built for FP8."""
    dtype = _DTYPES.get(str(config.params_dtype), str(config.params_dtype))
    if config.fp8:
        plan = precision.PrecisionPlan(model_dtype=dtype, kernel_fp8=f"megatron {config.fp8} {config.fp8_recipe}")
    elif config.quant_recipe is None:
        plan = precision.PrecisionPlan(model_dtype=dtype)
    elif precision.is_experts_recipe(config.quant_recipe):
        plan = precision.PLANS[precision.FP8_EXPERTS]
    else:
        plan = precision.PrecisionPlan(model_dtype=dtype, kernel_fp8="a precision file of the user")
    for name in ("model_dtype", "kernel_fp8", "dispatch", "checkpoint_owner"):
        facts.put(f"precision.{name}", getattr(plan, name))
    if plan.kernel_fp8 not in ("none", "experts"):
        facts.put("precision.dispatch", None, "Megatron's own FP8 decides it, and does not say")
        facts.put("precision.fp8_layers", None, "Megatron's own FP8 wraps every layer")
        return
    in_fp8 = [
        one.layer_number for one in modules(chunks) if getattr(one, "in_fp8", False) and hasattr(one, "linear_fc1")
    ]
    facts.put("precision.fp8_layers", sorted(number for number in in_fp8 if number is not None))


def _data(facts: Facts, args: Any) -> None:
    from megacpp_mcore.data.arguments import blends
    from megacpp_mcore.data.manifest import load_manifest

    facts.put("tokenizer.kind", args.tokenizer_type, "the run names no tokenizer")
    facts.put("tokenizer.vocab_size", args.padded_vocab_size)
    facts.put("data.fill_in_the_middle", bool(args.fim_data))
    named = blends(_data_words(args))
    if args.mock_data or not named:
        facts.put("data.kind", "mock" if args.mock_data else None, "the run names no dataset")
        for path in ("data.checksum", "data.datasets", "tokenizer.checksum"):
            facts.miss(path, "mock data has no files" if args.mock_data else "the run names no dataset")
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
            facts.miss("data.checksum", str(error))
            facts.miss("tokenizer.checksum", str(error))
        else:
            sums[prefix] = manifest.files[".bin"]["sha256"]
            tokenizers.add(manifest.tokenizer["checksum"])
    facts.put(
        "data.datasets",
        [{"name": Path(one).name, "weight": weight, "sha256": sums[one]} for one, weight in datasets],
    )
    if None not in sums.values():
        words = [word for blend in named for word in (blend.flag, *blend.words)]
        content = [sums.get(word.strip(), word) for word in words]  # weights, and datasets by what is in them
        digest = hashlib.sha256(json.dumps([content, args.split]).encode()).hexdigest()
        facts.put("data.checksum", digest)
        one = tokenizers.pop() if len(tokenizers) == 1 else None
        facts.put("tokenizer.checksum", one, "the datasets' manifests do not name one tokenizer")


def _data_words(args: Any) -> list[str]:
    """The words of a command line that name the run's datasets."""
    words: list[str] = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        values = getattr(args, name, None)
        if values:
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    for name in ("data_args_path", "per_split_data_args_path"):
        if getattr(args, name, None):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return words


def _routing(facts: Facts, chunks: Sequence[Any], config: Any) -> None:
    if config.num_moe_experts is None:
        facts.miss("routing", "the model has no experts")
        return
    facts.put("routing.experts", config.num_moe_experts)
    facts.put("routing.forced_balance", bool(config.moe_router_force_load_balancing))
    facts.put(
        "routing.capacity_factor", config.moe_expert_capacity_factor, "experts have no capacity, nothing is dropped"
    )
    facts.put("routing.expert_input", "padded" if config.moe_pad_expert_input_to_capacity else "jagged")
    names = (
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_score_function",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_token_drop_policy",
        "moe_ffn_hidden_size",
        "moe_shared_expert_intermediate_size",
    )
    facts.put("routing.settings", {name: getattr(config, name) for name in names})
    top_k = config.moe_router_topk
    facts.put("routing.top_k", top_k)


def _indexer(facts: Facts, model: Model) -> None:
    if not {"F", "S"} & set(model.roles):
        facts.miss("indexer", "the model has no sparse attention")
        return
    facts.put("indexer.top_k", model.dsa.topk)
    facts.put("indexer.loss_coefficient", model.dsa.loss_coeff)
    facts.put("indexer.warmup_steps", model.dsa.warmup_steps)


def _recomputation(config: Any, settings: PluginConfig | None) -> Recomputation:
    return Recomputation.of_run(config, settings.recompute if settings is not None else None)


def _flops(facts: Facts, model: Model, args: Any, config: Any, settings: PluginConfig | None) -> None:
    """The count of a step, of which the assembly makes rates."""
    import torch

    from megacpp_mcore.layer_specs.nam56r import model_chunks

    how = _recomputation(config, settings)
    if facts.values.get("batch.documents") != "together":
        facts.miss("flops", "documents are kept apart, and how long they were is not recorded")
        return
    step = flops.step(model, args.global_batch_size, seq_length=args.seq_length, vocab_size=args.padded_vocab_size)
    again = recomputed(model, step, how, model_chunks(config))
    plan = precision.PrecisionPlan(
        model_dtype=facts.values["precision.model_dtype"],
        kernel_fp8="experts" if facts.values["precision.kernel_fp8"] == "experts" else "none",
    )
    tf32 = bool(torch.backends.cuda.matmul.allow_tf32)
    model_parts = flops_report.by_precision(model, step, plan, tf32=tf32)
    more = flops_report.by_precision(model, again, plan, tf32=tf32)
    counted = flops_report.record(step, again)
    counted["by_precision"] = {
        name: {"model_flops": part.total.training, "hardware_flops": part.total.training + more[name].total.training}
        for name, part in model_parts.items()
    }
    facts.put("flops", counted)
