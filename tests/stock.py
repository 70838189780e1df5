"""Stock Megatron in this process, without its globals: parse, validate, build as ``pretrain_gpt.py`` does, patch, clean up.

Nothing here imports torch or Megatron before it is called.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, Model, with_overrides
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, Training
from tests import forks

if TYPE_CHECKING:
    from megacpp_mcore.patches.machinery.record import Patch
    from megacpp_mcore.patches.machinery.registry import Registry

ROOT = Path(__file__).parents[1]
PARTS = {"embedding": "embedding", "output_layer": "head", "mtp": "mtp", "decoder.final_layernorm": "norm"}


def words(
    model: Model,
    *extra: str,
    device: str = "cpu",
    data: Sequence[str] = ("--mock-data",),
    layout: Layout | None = None,
    model_class: str = GPT,
    **training: Any,
) -> list[str]:
    """Megatron's arguments that train ``model``: by default on the CPU in fp32 with Megatron's own layers."""
    on_cpu = {"precision": "fp32", "transformer_impl": "local"} if device == "cpu" else {}
    options = {**on_cpu, "device": device, "data": tuple(data), "tokenizer": tokenizer_words(model), **training}
    return list(lower(Run(model, layout or Layout(), Training(**options, extra=extra), model_class)))


def parse(words: Sequence[str], world_size: int = 1) -> Namespace:
    """Parsed and validated by stock Megatron; its global variables stay unset."""
    from megatron.training import arguments as stock

    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    listing = contextlib.redirect_stdout(io.StringIO())  # Megatron prints every argument
    argv = mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words])
    made = mock.patch.object(stock, "add_megatron_arguments", return_value=_parser())
    with listing, argv, made, mock.patch.dict("os.environ", environment):
        arguments = stock.parse_args()
        stock.validate_args(arguments)
    return arguments


@functools.cache
def _parser() -> ArgumentParser:
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    # The texts of --help, for which it parses the source of every class of its configuration.
    with mock.patch.object(ArgumentGroupFactory, "_get_field_docstrings", return_value={}):
        return add_megatron_arguments(ArgumentParser(allow_abbrev=False))


@contextlib.contextmanager
def gpu_host() -> Iterator[None]:
    """What Megatron's validation asks of a GPU host: a Hopper, and Transformer Engine's kernels that sort tokens; none runs."""
    names = ("fused_permute", "fused_permute_with_probs", "fused_unpermute")
    names += ("fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)))
        for name in names:
            stack.enter_context(mock.patch(f"megatron.core.transformer.moe.moe_utils.{name}", mock.DEFAULT))
        yield


def model_config(words: Sequence[str], world_size: int = 1) -> Any:
    """The GPTModelConfig of a stock run with these words."""
    from megatron.training.argument_utils import gpt_config_from_args

    return gpt_config_from_args(parse(words, world_size))


@contextlib.contextmanager
def cpu_lane() -> Iterator[None]:
    """The CPU lane, and no patch left behind."""
    from megacpp_mcore import cpu, patches

    lane = cpu.install()
    try:
        yield
    finally:
        patches.revert()
        lane.remove()


@contextlib.contextmanager
def patched(*patches: Patch) -> Iterator[Registry]:
    """These patches in place, by a registry of their own."""
    from megacpp_mcore.patches.machinery.registry import Registry

    registry = Registry(patches)
    registry.apply([patch.name for patch in patches])
    try:
        yield registry
    finally:
        registry.revert()


def makes(patch: Patch) -> dict[str, Callable[[Any], Any]]:
    """What the patch makes of each target, by its name without the module: for tests of a replacement by itself."""
    return {edit.target.partition(":")[2]: edit.make for edit in patch.edits}


def printed(code: str, *words: str, first: Path | None = None, timeout: float = 300) -> Any:
    """The JSON of the last line that ``code`` prints in a Python of its own, with ``first`` before all on its path."""
    path = os.pathsep.join([str(root) for root in (first, ROOT) if root is not None])
    ended = forks.run(["-c", code, *words], timeout=timeout, PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def on_ranks(module: str, count: int, folder: Path, *words: str) -> list[Any]:
    """What ``main(folder, *words)`` of a module of the tests returns in each of ``count`` processes, which are started as
    torchrun does and are to be :func:`one_process` of them."""
    import torch

    code = f"import os, sys, torch; from pathlib import Path; from {module} import main; folder = Path(sys.argv[1]); "
    code += "torch.save(main(folder, *sys.argv[2:]), folder / (os.environ['RANK'] + '.pt'))"
    status, output = forks.run_ranks(["-c", code, str(folder), *words], count, megatron=True)
    assert status == 0, output[-6000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


@contextlib.contextmanager
def one_process(store: Path, **sizes: int | None) -> Iterator[None]:
    """The CPU lane and Megatron's process groups for one process, or one of several of these ``sizes`` meeting by ``store``."""
    rank, world = (int(os.environ[name]) if sizes else default for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    with cpu_lane():
        import torch
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        torch.manual_seed(1234)
        distributed = torch.distributed
        met = distributed.FileStore(str(store), world)
        distributed.init_process_group("gloo", store=met, rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
        finally:
            loss_scale(1.0)
            DSAIndexerLossLoggingHelper.tracker.clear()
            MTPLossLoggingHelper.tracker.clear()
            random.get_cuda_rng_tracker().reset()
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()


def restart_random(seed: int = 1) -> None:
    """Start Megatron's generators of random numbers anew."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def build(
    overrides: Mapping[str, Any],
    preset: Model,
    folder: Path,
    *extra: str,
    precision: str = "fp32",
    seed: int = 1234,
    model_class: str = GPT,
    layout: Layout | None = None,
    changed: Callable[[list[str]], None] = lambda _: None,
    **settings: Any,
) -> Any:
    """The model that stock builds for ``preset`` with ``overrides`` and ``settings``, in :func:`one_process`, or in each of
    those of ``layout``."""
    import yaml
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training import argument_utils, global_vars
    from megatron.training.models.gpt import GPTModelBuilder
    from megatron.training.models.hybrid import HybridModelBuilder

    destroy_moe_metrics_tracker()  # stock sizes it by the first model of the process
    file = folder / "megacpp.yaml"
    file.write_text(yaml.safe_dump({"model": preset.name, "overrides": dict(overrides), **settings}))
    ranks = layout.processes if layout else 1
    command = words(
        with_overrides(preset, overrides),
        *extra,
        precision=precision,
        model_class=model_class,
        layout=layout,
        processes=ranks,
    )
    changed(command)
    with mock.patch.dict("os.environ", {"MEGACPP_CONFIG": str(file)}):
        restart_random(seed)
        groups, args = ProcessGroupCollection.use_mpu_process_groups(), parse(command, ranks)
        if model_class == GPT:
            return GPTModelBuilder(argument_utils.gpt_config_from_args(args)).build_model(groups)
        with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
            return HybridModelBuilder(argument_utils.hybrid_config_from_args(args)).build_model(groups)


def small_config(kind: Any = None, **settings: Any) -> Any:
    """A TransformerConfig of stock's, or one of another ``kind``: for a CPU, with a layer, no fused kernel and no dropout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    off = ["gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"]
    off += ["persist_layer_norm", "apply_rope_fusion"]
    fixed = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "use_cpu_initialization": True}
    fixed |= {**dict.fromkeys(off, False), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return (kind or TransformerConfig)(**fixed | settings)


def hybrid_stack(parts: Any, attention: str, **more: Any) -> Any:
    """The spec of a HybridStack with the ``parts`` of a layer of GPT, whose attention is in layers of that name."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    names = ("input_layernorm", "self_attention", "self_attn_bda"), ("pre_mlp_layernorm", "mlp", "mlp_bda")
    attend, mlp = (TransformerLayerSubmodules(**{name: getattr(parts, name) for name in group}) for group in names)
    layers = {attention: ModuleSpec(module=TransformerLayer, submodules=attend)}
    layers |= {"mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp)}
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers, **more))


def stirred(model: Any, scale: float = 0.05) -> Any:
    """The model, to be trained, with every weight away from its initial value: ones, zeros and identities hide mistakes."""
    import torch

    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    loss_scale(1.0)
    return model.train()


def full_recompute(method: str = "uniform", layers: int = 1) -> tuple[str, ...]:
    """The words that have Megatron compute whole layers again."""
    return ("--recompute-granularity", "full", "--recompute-method", method, "--recompute-num-layers", str(layers))


def selective_recompute(*modules: str) -> tuple[str, ...]:
    """The words that have Megatron compute modules again."""
    return ("--recompute-granularity", "selective", "--recompute-modules", *modules)


@contextlib.contextmanager
def one_rank(rank: int, processes: int, layout: Layout) -> Iterator[None]:
    """The CPU lane and Megatron's process groups for one of several processes that are not there: to build, not to run."""
    with cpu_lane():
        import torch
        from megatron.core import parallel_state
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
        virtual = layout.virtual if layout.virtual > 1 else None
        parallel_state.initialize_model_parallel(
            layout.tensor, layout.pipeline, virtual, expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=1, create_gloo_process_groups=False,
        )  # fmt: skip
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build_on_meta(model: Model, layout: Layout | None = None, processes: int = 1) -> list[Any]:
    """The GPTModels of a rank on the meta device, every module, no memory; needs :func:`one_process` or :func:`one_rank`."""
    import torch
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.training.models.gpt import GPTModelBuilder

    layout = layout or Layout()
    config = model_config(words(model, layout=layout, processes=processes), processes)
    config.transformer.perform_initialization = False
    # The lane draws a number to seed the experts with, and stages compare embeddings: meta tensors have no values for that.
    stock_init = SequentialMLP.__init__.__wrapped__
    equal = mock.patch.object(LanguageModule, "_is_in_embd_group", return_value=False)
    with torch.device("meta"), mock.patch.object(SequentialMLP, "__init__", stock_init), equal:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        stages = range(layout.virtual) if layout.virtual > 1 else [None]
        return [GPTModelBuilder(config).build_model(groups, vp_stage=stage) for stage in stages]


def family(layer: Any) -> str:
    """Return the letter of a built layer, inferred from its modules."""
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from megacpp_mcore.layer_specs.mamba import Mamba3Mixer
    from megacpp_mcore.layer_specs.recurrent import M2RNNMixer

    kinds = {(MLASelfAttention, AbsorbedMLASelfAttention): "A", Mamba3Mixer: "M", M2RNNMixer: "R", IdentityOp: "E"}
    (letter,) = [letter for kind, letter in kinds.items() if isinstance(layer.self_attention, kind)]
    expected_mlp = MoELayer if letter == "E" else IdentityOp
    assert isinstance(layer.mlp, expected_mlp), f"layer {layer.layer_number} has the MLP {type(layer.mlp).__name__}"
    return letter


def padding(model: Any) -> dict[str, int]:
    """How many numbers less than it has the weights of a model's input projections count: those of rows that fill up."""
    from megacpp_mcore.layer_specs.projection import InProjection

    return {
        f"{name}.{weight}": (sum(slot.rows for slot in placed) - len(getattr(module, weight))) * model.config.hidden_size
        for name, module in model.named_modules()
        if isinstance(module, InProjection)
        for weight, placed in (("weight", module.slots), ("replicated_weight", module.replicated_slots))
        if placed
    }


def parameters_by_part(model: Any) -> dict[str, int]:
    """Parameters of a built GPTModel, by the parts that ``Model.parameters`` counts; rows that only fill up do not count."""
    filled = padding(model)
    letters = [family(layer) for layer in model.decoder.layers]
    counts = dict.fromkeys("AMER", 0) | dict.fromkeys(PARTS.values(), 0)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            part = letters[int(name.split(".")[2])]
        else:
            part = next(part for prefix, part in PARTS.items() if name.startswith(prefix + "."))
        counts[part] += parameter.numel() + filled.get(name, 0)
    return counts


def loss_scale(scale: float) -> None:
    """Set the scale of all losses that ride on an activation (MoE, MTP, indexer)."""
    import torch
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    for scaler in (DSAIndexerLossAutoScaler, MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.main_loss_backward_scale = torch.full((1,), scale)  # stock would copy it into one of another shape
