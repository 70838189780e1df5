"""Layers of every family, at the width of ``nam56r``, and the block of multi-token prediction: forward and backward.

A layer is built as a run builds it, with the backends that ``auto`` chooses. Its parity is checked against the same layer, with
the same weights in the same dtype, on the reference of every op: ops are compared with float64 in their own benchmarks. Only
M²RNN's truth runs in float64 here too, and its reference in the dtype is the yardstick: the gradients of its convolutions'
weights are sums over all tokens whose terms cancel, where that reference is off by more than the limit. A layer that itself
runs only on references, or has no op of ours, is the same program as its truth: the comparison then shows only what is not
repeatable, and the verdict is "is the reference".

Legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megacpp_mcore.backends import STOCK, Dispatcher, own_candidates
from megacpp_mcore.backends.candidates import EXPERTS
from megacpp_mcore.bench.cases.peers import lacking, patched
from megacpp_mcore.bench.catalog import OURS, PEER, Options
from megacpp_mcore.bench.problem import BOTH, YARDSTICK_LIMIT, Draw, Floor, Inputs, Problem, Variant, Weights
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model import Model, flops, preset, with_overrides
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.flops import Work
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from megacpp_mcore.ops.indexer.reference import causal_topk
from megacpp_mcore.ops.testing import PEER_RATIO, worst_row

LIMITS = {"bfloat16": 4e-2, "float32": 1e-4}
"""The largest error of a row: two backends of one op round differently, and the layer's projections propagate that."""

SMALL = 1e-2
"""Scale of the hidden states: a layer normalises them, and a large residual would mask its own part of the output."""

BEFORE_SELECTION = ("rms_norm", "mla_latents", "indexer_inputs", "indexer", "router")
"""Ops whose results select keys or experts. Rounded differently, they exchange one key of 256, and four in the worst row, or
an expert of a token, which changes the output by a fifth without being an error. So a layer that selects is compared with one
that uses the same backends of these ops. The indexer's and the router's benchmarks check that they select the right ones."""

REFERENCE = "reference"
MODELS = ("nam56r", "nam56r_h4096", "nam56r_tiny")


@dataclass(frozen=True)
class Plan:
    """Which layer is built, and how: ``number`` is the layer's in the trunk, 0 for the block of multi-token prediction."""

    options: Options
    model: Model
    config: Any
    kind: str
    number: int


@dataclass(frozen=True)
class Built:
    """A layer, the function that calls it on hidden states ``[S, B, D]``, and the backends that it uses."""

    module: Any
    call: Callable[[torch.Tensor], torch.Tensor]
    backends: str
    is_reference: bool

    def variant(self, name: str, side: str, inputs: Inputs, weights: Weights | None = None) -> Variant:
        """Return the layer as a variant with the values of ``inputs`` in its ``weights``, by default all of its parameters.

        Raises:
            KeyError: one is not among the inputs.
        """
        own = inputs.copied_to(dict(self.module.named_parameters()) if weights is None else weights)
        is_reference = side == OURS and self.is_reference
        return Variant.of(name, side, lambda drawn: self.call(drawn.leaves["hidden"]), own, is_reference=is_reference)


def _problem(kind: str, peer: Callable[[Plan, Inputs], Variant] | str, options: Options) -> Problem:
    """Compare layers of ``kind``, a letter with its role; ``peer`` makes the peer, or says why there is none."""
    by_width, hidden_size = {preset(name).hidden_size: preset(name) for name in MODELS}, options.shape["hidden"]
    if hidden_size not in by_width:
        widths = ", ".join(f"{width} ({model.name})" for width, model in by_width.items())
        raise BenchmarkError(f"size hidden is {hidden_size}; expected the width of a model: {widths}")
    model = with_overrides(by_width[hidden_size], {"seq_length": options.shape["S"]})
    kinds = [letter + (role or "") for letter, role in zip(model.layers, model.roles, strict=True)]
    number = 0 if kind == "mtp" else kinds.index(kind) + 1
    plan = Plan(options, model, _config(options, model), kind, number)
    draw, ours = Draw(options), _build(plan, {})
    weights, shape = dict(ours.module.named_parameters()), (*options.sizes("S", "B"), model.hidden_size)
    # Every weight is moved away from ones, zeros and identities, which hide mistakes. M²RNN's transition shrinks, as in its own
    # benchmark: one that stretches makes the recurrence chaotic, so that rounding an input has effects that grow along the
    # sequence until no two programs agree.
    with torch.no_grad():
        for name, parameter in weights.items():
            if name.endswith(".W"):
                parameter.mul_(0.8)
            parameter.add_(draw.normal(*parameter.shape, scale=0.01, dtype=parameter.dtype))
    hidden = draw.normal(*shape, scale=SMALL).requires_grad_()
    inputs = Inputs({"hidden": hidden, **weights}, {"out": draw.normal(*shape)})
    variants = [Variant.missing("stock", f"no peer: {peer}") if isinstance(peer, str) else peer(plan, inputs)]
    variants.append(ours.variant(f"ours ({ours.backends})", OURS, inputs))
    if options.device == "cuda" and not ours.is_reference:  # references synchronise with the host
        variants.append(variants[-1].captured())
    step = flops.step(model, options.shape["B"], seq_length=options.shape["S"])
    total, head = (step.layers[number - 1].total, Work(0, 0)) if number else (step.mtp[0].total, step.mtp[0].head)
    work = Work(total.forward - head.forward, total.backward - head.backward)
    stored, rows = sum(weight.nbytes for weight in weights.values()), hidden.nbytes
    works = Floor.pair(work, stored + 2 * rows, 3 * stored + 5 * rows, options.dtype)
    return Problem(inputs, variants, works, *_truth_and_limits(plan, inputs), shape={"model": model.name, **options.shape})


def _truth_and_limits(plan: Plan, inputs: Inputs) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the results on the ops' references (except :data:`BEFORE_SELECTION` in a layer that selects), and the limits."""
    same = BEFORE_SELECTION if plan.kind in ("E", "A" + grammar.FULL_INDEX) else ()
    references = [c.op for c in own_candidates() if c.name == REFERENCE and c.op not in same]
    layer = _build(plan, dict.fromkeys(references, REFERENCE))
    run = layer.variant(REFERENCE, OURS, inputs).runs[BOTH]
    dtype_results = dict(zip(inputs.names, run(inputs), strict=True))
    limits = dict.fromkeys(inputs.names, LIMITS[plan.options.dtype])
    if plan.kind != "R":
        return dtype_results, limits

    def widened(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def in_double(fn: Any, first: torch.Tensor, *args: Any, **weights: Any) -> tuple[torch.Tensor, Any]:
        """Call an op on its inputs in float64, and return its output in the dtype of the first one."""
        output, state = fn(*map(widened, (first, *args)), **{name: widened(value) for name, value in weights.items()})
        return output.to(first.dtype), state

    mixer = layer.module.self_attention
    mixer.backend = SimpleNamespace(fn=partial(in_double, mixer.backend.fn))
    truth = dict(zip(inputs.names, run(inputs), strict=True))
    errors = {name: PEER_RATIO * worst_row(dtype_results[name], truth[name], name) for name in truth}
    return truth, {name: max(limits[name], min(errors[name], YARDSTICK_LIMIT)) for name in truth}


def _config(options: Options, model: Model) -> Any:
    """Return Megatron's TransformerConfig of a run of ``model`` on this device."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from megacpp_mcore.arguments.lowering import lower
    from megacpp_mcore.data.tokenizer import tokenizer_words
    from megacpp_mcore.model.run import Run
    from megacpp_mcore.model.training import GPT, Training

    training = Training(
        device=options.device, precision="bf16" if options.dtype == "bfloat16" else "fp32",
        transformer_impl="local" if lacking(options.device) else "transformer_engine",
        tokenizer=tokenizer_words(model), data=("--mock-data",),
    )  # fmt: skip
    words = ["bench", *lower(Run(model, training=training, model_class=GPT))]
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()):  # it prints every argument
        arguments = parse_args()
        validate_args(arguments)
        config = gpt_config_from_args(arguments).transformer
    config.gradient_accumulation_fusion = False  # there is no optimizer and no main_grad here
    return config


def _build(plan: Plan, requests: Mapping[str, str], *, stock_core: bool = False) -> Built:
    """Return the layer of ``plan``, built as a run does, with the requested backends."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.spec_utils import build_module

    from megacpp_mcore.layer_specs import nam56r
    from megacpp_mcore.layer_specs.mtp import mtp_block as mtp_specs
    from megacpp_mcore.layer_specs.parts import parts_for

    destroy_moe_metrics_tracker()  # stock sizes it by the process's first model
    nam56r.prepare(plan.model, plan.config, None)
    parts, dispatcher = parts_for(plan.config), Dispatcher(requests)
    sources = grammar.source_layers(plan.model.roles)
    cache = IndexCache({shared: full for shared, full in sources.items() if shared == plan.number})
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if plan.number:
        spec = nam56r.layer_spec(plan.model, plan.config, plan.number, parts, dispatcher, cache)
        attention = spec.submodules
    else:
        (spec,) = mtp_specs(parts, dispatcher, plan.model.window(plan.model.mtp.attention)).layer_specs
        attention = spec.submodules.mtp_model_layer.submodules
    if stock_core:
        attention.self_attention.submodules.core_attention = parts.backend.core_attention()
    with patched("mla-core-attention") if stock_core else contextlib.nullcontext():
        module = build_module(spec, config=plan.config, layer_number=plan.number or 1, pg_collection=groups)
    module = module.to(plan.options.device).train()
    if plan.options.dtype == "bfloat16":
        module = module.bfloat16()
    records = dispatcher.observed_backends()
    names = ", ".join(dict.fromkeys(f"{record['op']} {record['observed']}" for record in records))
    compared = {c.op for c in own_candidates() if c.name == REFERENCE}  # of other ops the truth is the same
    computing = [record["observed"] for record in records if record["op"] in compared and record["observed"] != STOCK]
    call = _call(plan, module, cache, sources.get(plan.number))
    return Built(module, call, names or "stock's modules", all(backend == REFERENCE for backend in computing))


def _call(plan: Plan, module: Any, cache: IndexCache, full: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the layer's call; fixed are the next tokens' embeddings, and indices that a Shared layer has from ``full``."""
    (B, S), draw = plan.options.sizes("B", "S"), Draw(plan.options, seed=2)
    if not plan.number:
        token_BS = draw.integers(plan.model.vocab_size, B, S)
        position_BS = torch.arange(S, device=plan.options.device).expand(B, -1)
        embedded_SBD = draw.normal(S, B, plan.model.hidden_size)
        kwargs = {"attention_mask": None, "embedding": lambda **_: embedded_SBD}
        return lambda hidden_SBD: module(token_BS, position_BS, hidden_SBD, **kwargs)[0]
    if full is not None:
        selection = Selection(causal_topk(draw.normal(B, S, S, dtype=torch.float32), plan.model.dsa.topk))

    def call(hidden_SBD: torch.Tensor) -> torch.Tensor:
        if full is not None:
            cache.publish(full, selection)
        output = module(hidden_SBD, attention_mask=None)
        return output[0] if isinstance(output, tuple) else output

    return call


def _with_stock_core(plan: Plan, inputs: Inputs) -> Variant:
    """Return the same layer with the core attention that stock's own specs use."""
    return _build(plan, {}, stock_core=True).variant("stock core attention", PEER, inputs)


def _stock_moe(plan: Plan, inputs: Inputs) -> Variant:
    """Return the layer with stock's router, dispatcher and experts, whose matrices are separate parameters."""
    from megacpp_mcore.layer_specs.experts import expert_matrices

    stock = _build(plan, dict.fromkeys((EXPERTS, "router", "rms_norm"), STOCK))
    first, second = expert_matrices(stock.module.mlp.experts)
    by_name = {**dict(stock.module.named_parameters()), "mlp.experts.weight1": first, "mlp.experts.weight2": second}
    weights = {name: by_name[name] for name in inputs.leaves if name != "hidden"}
    return stock.variant("stock MoELayer", PEER, inputs, weights)


layer_a_full = partial(_problem, "A" + grammar.FULL_ATTENTION, _with_stock_core)
layer_a_full_dsa = partial(_problem, "A" + grammar.FULL_INDEX, "stock's DSA keeps no indices for Shared layers")
layer_a_shared_dsa = partial(_problem, "A" + grammar.SHARED_INDEX, "stock has no layer that shares indices")
layer_m = partial(_problem, "M", "mamba-ssm's module is the peer in mamba3")
layer_e = partial(_problem, "E", _stock_moe)
layer_r = partial(_problem, "R", "no package has this layer; the recurrence's peer is in m2rnn")
mtp_block = partial(_problem, "mtp", _with_stock_core)
