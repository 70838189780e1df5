"""Persistent memory of a rank: weights, gradients, fp32 main weights and Adam's moments, in bytes. No torch.

As in Megatron 0.19. Gradient buffers are persistent; the distributed optimizer shards main weights and moments over the ranks
with the same weights, FSDP2 shards everything. The fp32 parameters of M and R layers are counted as bf16 with a main weight,
two bytes too many (4 MB in ``nam56r``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.definition import Layout, Model
from megacpp_mcore.model.families import ATTENTION, FAMILIES, MAMBA, Family
from megacpp_mcore.model.families.mamba_family import wide_width
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.model.parameters import by_stage
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import MTP_MLP, MTP_MLP_TOKENS, Recompute

ROOM = 16
"""1/ROOM of a GPU is reserved for activations, workspaces and CUDA itself. On an 80 GB GPU that is 5.3 GB: a step of ``nam56r``
with one micro-batch of 4096 tokens used 4.6 GB on top of its states (experiments/results/quarter_h200.csv), and CUDA, which
torch does not count, uses half a GB."""


ACTIVATIONS = 20
"""Bytes that a step is assumed to hold for each token, layer and value of the hidden states, activations and workspaces
together: those of ``nam56r`` in CUDA graphs were 15 (experiments/results/gpus_h200.csv)."""


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    main_weights: int
    moments: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.gradients + self.main_weights + self.moments

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in asdict(self).items() if size)
        return f"{self.total / 1e9:.1f} GB ({parts})"


def process_parameters(run: Run) -> tuple[int, int] | None:
    """Return a rank's parameters in the largest stage: without routed experts, and those of routed experts; None if unknown."""
    if run.model is None or run.execution.own_stages:
        return None
    try:
        stages = by_stage(run.model, run.layout)
    except ModelError:  # the layers cannot be split that way, and building them fails
        return None
    layout = run.layout
    return max(((part.tensor // layout.tensor + part.whole, part.expert // layout.expert) for part in stages), key=sum)


def states(run: Run) -> States | None:
    """Return the persistent memory of a rank in the largest stage; None if it is unknown: without a model of this package,
    with stages that it does not mark, or with other states than these."""
    held = process_parameters(run)
    if held is None or run.execution.own_states or run.training.optimizer != "adam":
        return None
    how = run.execution
    weight, main = (4, 0) if run.precision == "fp32" else (2, 4)
    gradient = weight if how.fsdp else how.grad_bytes  # FSDP2 has gradients of the dtype of the weights
    if how.precision_aware and run.precision == "bf16":
        main = 2
    moments = sum({"fp32": 4, "fp8": 1}.get(kept, 2) for kept in (how.exp_avg, how.exp_avg_sq))
    sizes = [0, 0, 0, 0]
    ranks_of_a_stage = run.processes // run.layout.pipeline
    for count, shards in zip(held, (run.layout.tensor, run.layout.expert), strict=True):
        replicas = max(1, ranks_of_a_stage // shards)
        of_all, of_optimizer = (replicas if how.fsdp else 1, replicas if how.fsdp or how.distributed_optimizer else 1)
        for place, (width, ranks) in enumerate(
            ((weight, of_all), (gradient, of_all), (main, of_optimizer), (moments, of_optimizer))
        ):
            sizes[place] += width * count // ranks
    return States(weights=sizes[0], gradients=sizes[1], main_weights=sizes[2], moments=sizes[3])


def usable(gpu_bytes: int) -> int:
    """Return the bytes of a GPU that states may take: without what is reserved."""
    return gpu_bytes - gpu_bytes // ROOM


def quantised(run: Run, held: States) -> int:
    """Return the bytes of FP8 copies of weights, in both orders, of all weights if some are in FP8, and of the rest of their
    blocks, which CUDA graphs then cannot use."""
    own = run.settings is not None and (
        run.settings.fp8.recipe is not None or any("fp8" in name for name in run.settings.backends.values())
    )
    return held.weights + _unfilled(run) if own or run.training.plan.kernel_fp8 != "none" else 0


def _unfilled(run: Run) -> int:
    """Return the bytes that kept FP8 copies of weights leave of blocks of the allocator, with CUDA graphs.

    A layer's copies are made in the first step, and assumed to lie in a block that the layer's widest tensor has freed. No
    graph can use the rest of it: graphs have a pool of their own, and a partly used block is never released. Inferred from
    what ``nam56r`` reserved on an H200 (experiments/results/nam56r_h200.csv), to within 2 %; not compared with sharded
    experts, which hold the tokens of all ranks.
    """
    model, layout = run.model, run.layout
    if model is None or run.settings is None or run.execution.cuda_graph_impl == "none":
        return 0
    tokens = run.training.micro_batch_size * model.seq_length // layout.context // layout.tensor
    hidden, moe, inputs = model.hidden_size, model.moe, wide_width(model.hidden_size, model.mamba3)
    experts, ffn = moe.experts // layout.expert, model.ffn_hidden_size
    at_once = min(tokens, MTP_MLP_TOKENS) if run.settings.recompute.mtp else tokens
    # Ops, layers, values of the widest tensor, and rows of the weights, of the width of the hidden states.
    sizes: tuple[tuple[set[str], int, int, int], ...] = (
        (
            {"routed_mlp", "grouped_mlp"},
            model.layers.count("E"),
            min(moe.topk, experts) * layout.expert * hidden * tokens,
            2 * moe.ffn_hidden_size * experts,
        ),
        ({"mamba3_projection"}, model.layers.count("M"), inputs * tokens, inputs // layout.tensor),
        ({"feed_forward"}, min(1, model.mtp.depth), ffn * at_once, 2 * ffn),
    )
    in_fp8 = {op for op, backend in run.settings.backends.items() if "fp8" in backend}
    rest = sum(layers * max(0, 2 * widest - 2 * hidden * rows) for ops, layers, widest, rows in sizes if ops & in_fp8)
    return rest // layout.pipeline


def mamba_keeps(run: Run, gpu_bytes: int) -> str | None:
    """Return what M layers may keep for their backward pass on a GPU of ``gpu_bytes``: ``all``, ``scan``, or None for neither.

    Estimated only for several ranks of MIMO: at rank 1 kernels keep it anyway. An FP8 copy of every weight is allowed for if
    the run has one.
    """
    model, held = run.model, states(run)
    if model is None or held is None or model.mamba3.mimo_rank == 1:
        return None
    tokens, layers = run.training.micro_batch_size * model.seq_length // run.layout.context, _in_flight(run, model)
    step = ACTIVATIONS * model.hidden_size * (len(layers) + model.mtp.depth) * tokens
    # What nam56r does not have: experts wider than the hidden states, rows gathered from other ranks, logits.
    wider = 4 * max(0, model.moe.topk * model.moe.ffn_hidden_size - model.hidden_size)
    gathered = 2 * model.hidden_size * (run.layout.expert - 1)
    step += (wider + gathered) * layers.count("E") * tokens
    if run.settings is not None and not run.settings.speed_defaults.linear_cross_entropy:
        step += 6 * model.vocab_size * (1 + model.mtp.depth) * tokens
    free = usable(gpu_bytes) - held.total - step - quantised(run, held)
    for kept, size in _mamba_kept(model).items():
        if size * tokens * layers.count("M") <= free:
            return kept
    return None


def _in_flight(run: Run, model: Model) -> str:
    """Return the letters of the layers, once per micro-batch, with activations that the first stage holds at its peak.

    As many model chunks as Megatron's schedules run forward before the first backward (``get_pp_rank_microbatches``, 0.19),
    each taken for the one with the most layers.
    """
    stages, virtual = run.layout.pipeline, run.layout.virtual
    if stages == 1:
        return model.layers
    ahead = stages if virtual == 1 else 2 * (stages - 1) + (virtual - 1) * (run.execution.stage_group or stages) + 1
    largest = max(model.chunks(run.layout), key=len)
    return model.layers[largest.start - 1 : largest.stop - 1] * ahead


def _mamba_kept(model: Model) -> dict[str, int]:
    """Return the bytes a token and M layer that ``triton_keep_all`` and ``triton_keep_scan`` keep on top of the rest."""
    ssm = model.mamba3
    rows = 2 * model.mamba_heads * ssm.mimo_rank  # bytes of a column, 16 bits each
    tables = model.mamba_heads * (12 + 4 * ssm.angles) + 4 * ssm.groups * ssm.mimo_rank * ssm.state
    scan = rows * ssm.head_dim + tables
    return {"all": scan + 2 * rows * ssm.state, "scan": scan}


WORKSPACE = 4_000_000_000
"""Bytes on top of the counted tensors: a chunk of logits and its gradient, cuBLAS, what the allocator cannot reuse."""
_SCRATCH, _BLOCK_BYTES = 5.5, 2**29
"""Tensors as large as a row's keys that M's backward pass holds, and the most bytes of each (``ops/mamba3/triton.py``)."""
_RATE, _SCAN_S = 6.6e14, {"m": 9e-8, "r": 1.2e-7}
"""FLOPs a second of repeated products, and seconds a token and layer of scans, which are bound by bytes and by their chain: of
``nam56r`` on an H200."""


def activations(run: Run, how: Recomputation) -> dict[str, int] | None:
    """Return the bytes that a rank holds in the backward pass besides its states, by part; None with pipeline stages, which
    hold several micro-batches, and without a known model.

    What layers keep follows from the widths of their tensors. Including the states, it is within 2 % of what five recipes of
    ``nam56r`` reserved on H100s and H200s (``examples/receipts``), in CUDA graphs; recompute has not been compared yet.
    """
    model, layout = run.model, run.layout
    if model is None or layout.pipeline > 1:
        return None
    tokens = run.training.micro_batch_size * model.seq_length // layout.context // layout.tensor
    hidden, is_full = 2 * model.hidden_size, how.granularity == "full"
    parts: dict[str, int] = {}
    largest = 0

    def add(part: str, family: Family, role: str | None, *more: int) -> None:
        nonlocal largest
        dropped, rest = family.kept(model.shape, role, *model.sizes(family))
        total = 2 * hidden + dropped + rest + sum(more)
        repeats = dropped if family.recompute in how.own.on else 0
        kept = hidden if is_full else total - repeats
        parts[part] = parts.get(part, 0) + kept * tokens
        # Gradients of what a layer keeps, and what was not kept.
        largest = max(largest, 2 * total - kept)

    for letter, role in zip(model.layers, model.roles, strict=True):
        add(FAMILIES[letter].part, FAMILIES[letter], role)
    in_chunks = MTP_MLP in how.own.on
    for _ in range(model.mtp.depth):
        # Both inputs, their norms and the projection's output; the second norm; the last norm; what is around GELU.
        add("MTP", ATTENTION, model.mtp.attention, 7 * hidden, 0 if in_chunks else 4 * model.ffn_hidden_size)
    losses = 1 + model.mtp.depth
    parts["losses"] = losses * (2 * hidden * tokens + hidden * model.vocab_size // layout.tensor)
    scratch: float = 8 * model.ffn_hidden_size * min(tokens, MTP_MLP_TOKENS) if in_chunks else 0
    if MAMBA.letter in model.layers:
        ssm = model.mamba3
        keys = 2 * model.mamba_heads * ssm.mimo_rank * max(ssm.state, ssm.head_dim) * tokens
        scratch += _SCRATCH * min(keys, _BLOCK_BYTES)
    return parts | {"workspace": round(largest * tokens + scratch) + WORKSPACE}


def estimate(run: Run, gpu_bytes: int) -> int | None:
    """Return the bytes that a rank holds at the peak of a step on a GPU of ``gpu_bytes``, with the run's recompute and what M
    layers keep there; None if that is unknown, as when Megatron's modules or some of the layers are recomputed."""
    model, how, own = run.model, run.execution, run.settings.recompute if run.settings is not None else Recompute()
    if model is None or how.recompute_granularity == "selective" or how.recompute_method == "block":
        return None
    layers = Recomputation(own=own)
    if how.recompute_granularity is not None:
        layers = Recomputation(granularity="full", method="uniform", num_layers=1, own=own)
    held, parts = states(run), activations(run, layers)
    if held is None or parts is None:
        return None
    keeps, repeated = mamba_keeps(run, gpu_bytes), layers.granularity == "full" or MAMBA.recompute in own.on
    kept = 0 if keeps is None or repeated else _mamba_kept(model)[keeps] * model.layers.count(MAMBA.letter)
    tokens = run.training.micro_batch_size * model.seq_length // run.layout.context // run.layout.tensor
    return held.total + sum(parts.values()) + kept * tokens + quantised(run, held)


@dataclass(frozen=True)
class Choice:
    """One way to recompute: its bytes on a rank, states included, and the seconds that it adds to each token."""

    how: Recomputation
    total: int
    seconds: float


def choices(run: Run) -> list[Choice]:
    """Return the ways to recompute families, and whole layers, that need less memory than every quicker one, quickest first."""
    model, held = run.model, states(run)
    if model is None or held is None:
        return []
    names = [family.recompute for family in FAMILIES.values() if family in model.families and family.recompute]
    names += [MTP_MLP] if model.mtp.depth else []
    ways = [
        Recomputation(own=Recompute(**dict.fromkeys(chosen, True)))
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
    ]
    for own in (Recompute(), *([Recompute(mtp=True)] if model.mtp.depth else [])):
        ways.append(Recomputation(granularity="full", method="uniform", num_layers=1, own=own))
    step, candidates = flops.step(model), []
    for how in ways:
        of_parts = activations(run, how)
        if of_parts is None:
            return []
        on = names if how.granularity == "full" else how.own.on
        scans = sum(
            _SCAN_S.get(family.recompute, 0) * model.layers.count(family.letter)
            for family in FAMILIES.values()
            if family.recompute in on
        )
        seconds = recomputed(model, step, how).total.training / step.tokens / _RATE + scans
        candidates.append(Choice(how, held.total + sum(of_parts.values()) + quantised(run, held), seconds))
    least, front = math.inf, []
    for choice in sorted(candidates, key=lambda candidate: (candidate.seconds, candidate.total)):
        if choice.total < least:
            least = choice.total
            front.append(choice)
    return front


def fitting(run: Run, gpu_bytes: int) -> Iterator[tuple[Run, States]]:
    """Yield runs of the same model that fit on the fewest GPUs of ``gpu_bytes``, as many as ``run`` has or a multiple.

    Optimizer state is sharded over replicas. Layouts that split the model least come first; among them expert before tensor
    before pipeline parallelism.
    """
    sizes = (1, 2, 4, 8)
    layouts = [
        Layout(tensor=tensor, pipeline=pipeline, expert=expert, context=run.layout.context, sequence_parallel=tensor > 1)
        for pipeline, tensor, expert in itertools.product(sizes, sizes, sizes)
    ]
    layouts.sort(key=lambda layout: layout.pipeline * layout.tensor * layout.expert)
    execution = {"fp16": run.precision == "fp16", "distributed_optimizer": True}
    for count in (run.processes * more for more in (1, 2, 4, 8, 16, 32, 64)):
        fits = False
        training = dataclasses.replace(run.training, processes=count, extra=())
        for layout in layouts:
            if run.model is None or count % layout.processes:
                continue
            try:
                run.model.check_layout(layout)
            except ModelError:
                continue
            other = Run(run.model, layout, training, run.model_class, execution)
            held = states(other)
            if held is not None and held.total <= usable(gpu_bytes):
                fits = True
                yield other, held
        if fits:
            return
