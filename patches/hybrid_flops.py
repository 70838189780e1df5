"""hybrid-flops: the training loop's TFLOP/s come from an audited FLOP count of the trained model.

Activate: ``megacpp_mcore.patches.apply(["hybrid-flops"])``.
Scope: runs with ``--spec megacpp_mcore nam56r``, whose count is replaced; stock hybrid patterns with ``D`` or ``+`` layers or
multi-token prediction, and stock GPT with ``--experimental-attention-variant dsa``, whose count is
corrected. Packed documents are counted by their actual lengths.
Provenance: megatron-core 0.19.2 ``training/training.py``, ``core/models/hybrid/hybrid_layer_allocation.py``,
``core/transformer/experimental_attention_variant/{absorbed_mla,dsa}.py``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.model import MLA, Model, flops, preset
from megacpp_mcore.patches.dsa_index_cache import is_periodically_shared
from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit

logger = logging.getLogger(__name__)


class _Pairs(NamedTuple):
    """Numbers of (query, key) pairs: causal within documents, and those of them that top-k keeps, or a window."""

    causal: int
    selected: int
    windowed: int


_documents = SimpleNamespace(sums=None, pairs=None)
"""Attention pairs of an iteration's packed documents: ``sums`` while it runs, then ``pairs`` of the global batch; None if it is
not packed, or attention has no top-k.

The loop sums only lengths and squared lengths, which do not suffice: top-k caps each document separately. Evaluation is not
counted.
"""


def packed_pairs() -> tuple[int, int, int] | None:
    """Return the pairs of the last step's documents if packed, of all replicas: causal, kept by top-k, in a window."""
    return _documents.pairs


def _virtual_stages() -> int:
    """Virtual pipeline stages of a rank: each gets the documents of every micro-batch."""
    from megatron.core import parallel_state

    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


@edit(
    "megatron.training.training:update_seqlen_stats_from_cu_seqlens",
    "e267386573b6643bec436b7d91d8b5e0d5ddbd2cd443539985e546b5802d0e5b",
)
def _observed(original: Function, cu_seqlens: Any) -> None:
    """Add the pairs of a micro-batch with document boundaries ``cu_seqlens [N + 1]``; without a device sync."""
    import torch
    from megatron.training import global_vars, training

    original(cu_seqlens)
    # A loop other than Megatron's (Bridge, verl) may have no arguments.
    topk = getattr(global_vars._GLOBAL_ARGS, "dsa_indexer_topk", None)
    if cu_seqlens is None or cu_seqlens.numel() < 2 or topk is None or not torch.is_grad_enabled():
        return
    window = getattr(global_vars._GLOBAL_ARGS, "window_size", None)
    lengths_N = cu_seqlens.diff().to(training._seqlen_stats_in_iteration)  # float64, where it can be reduced
    pairs = []
    for limit in (None, topk, window and window[0] + 1):
        kept_N = lengths_N.clamp(max=limit) if limit else lengths_N
        pairs.append((kept_N * (kept_N + 1) / 2 + (lengths_N - kept_N) * kept_N).sum())
    sums = torch.stack(pairs)
    _documents.sums = sums if _documents.sums is None else _documents.sums + sums


@edit(
    "megatron.training.training:consume_seqlen_stats_in_iteration",
    "11adaf9837000c6c77b4e7e7fdbc1db08d1d4291f093e673dabfe71541bcfb3c",
)
def _closed(original: Function) -> Any:
    """Sum the pairs over data-parallel replicas, each with its own micro-batches.

    Stock divides by every parallel size but the number of virtual stages.
    """
    import torch
    from megatron.core import parallel_state

    totals = original()
    sums, _documents.sums, _documents.pairs = _documents.sums, None, None
    if sums is not None:
        if torch.distributed.is_initialized() and parallel_state.model_parallel_is_initialized():
            torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        _documents.pairs = _Pairs(*(round(value / _virtual_stages()) for value in sums.tolist()))
    return tuple(total and total / _virtual_stages() for total in totals)


@dataclass(frozen=True)
class _Batch:
    """A global batch as the loop describes it: equal sequences, or packed ones with the loop's two sums and our two."""

    sequences: int
    length: int
    packed_tokens: float | None
    packed_squares: float | None

    @property
    def packed(self) -> bool:
        return self.packed_tokens is not None or self.packed_squares is not None

    @property
    def pairs(self) -> _Pairs | None:
        """Pairs of the packed documents, if recorded."""
        return _documents.pairs if self.packed else None

    def selected_pairs(self, topk: int) -> int:
        """Return the number of pairs that top-k keeps."""
        pairs = self.pairs
        return self.sequences * flops.selected_pairs(self.length, topk) if pairs is None else pairs.selected

    @property
    def squares(self) -> float:
        """Σ L² over the sequences."""
        return self.sequences * self.length**2 if self.packed_squares is None else self.packed_squares

    @property
    def tokens(self) -> int:
        return self.sequences * self.length if self.packed_tokens is None else round(self.packed_tokens)

    @property
    def causal_pairs(self) -> int:
        """Σ L(L+1)/2 over the sequences."""
        return round(self.squares + self.tokens) // 2


def _audited_count(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``num_floating_point_operations(args, batch_size, Σ length², Σ length)``."""
    model_of = _remembered(_described_model)
    warn = functools.cache(functools.partial(logger.warning, "hybrid-flops: %s"))

    @functools.wraps(original)
    def num_floating_point_operations(
        args: Any,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> Any:
        batch = _Batch(batch_size, getattr(args, "seq_length", 0), total_real_tokens_in_batch, seqlen_squared_sum_in_batch)
        model = model_of(args)
        if model is not None:
            if batch.packed and batch.pairs is None:
                reason = "the lengths of the documents are unknown"
                warn(f"packed rows are counted as one document each, an overestimate: {reason}")
            return _training(model, batch, getattr(args, "padded_vocab_size", None))
        count = original(
            args,
            batch_size,
            seqlen_squared_sum_in_batch=seqlen_squared_sum_in_batch,
            total_real_tokens_in_batch=total_real_tokens_in_batch,
        )
        try:
            layers = list(_uncounted_attention(args))
            if batch.packed and batch.pairs is None and any(symbol == "D" for symbol, _ in layers):
                uncounted = "top-k of packed sequences cannot be counted"
            else:
                return count + _correction(args, batch, layers)
        except AttributeError as error:  # upstream needs fewer arguments
            uncounted = f"sparse attention cannot be counted ({error})"
        warn(f"{uncounted}; the figure is upstream's")
        return count

    return num_floating_point_operations


def _remembered(describe: Callable[[Any], Model | None]) -> Callable[[Any], Model | None]:
    """``describe`` with its result cached for the last object: the loop calls it twice per step with the same arguments."""
    seen: list[tuple[Any, Model | None]] = []

    def model_of(args: Any) -> Model | None:
        if not seen or seen[0][0] is not args:
            seen[:] = [(args, describe(args))]
        return seen[0][1]

    return model_of


def _described_model(args: Any) -> Model | None:
    """Return the model that ``args`` train through our spec, as the spec determines it; None for another spec or none."""
    named = lowering.preset_of(getattr(args, "spec", None))
    if named is None:
        return None
    settings = plugin_config.from_environment()
    return preset(named) if settings is None else settings.model  # the spec has checked the arguments against it


def _training(model: Model, batch: _Batch, vocabulary: int | None) -> int:
    """Training FLOPs of a batch; with packed documents linear in their pairs, so four counts determine them."""
    count = functools.partial(_counted, model, batch.sequences, batch.length, vocabulary)
    if batch.pairs is None:
        return count(None)
    base, units = count((0, 0, 0)), ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    return base + sum(number * (count(unit) - base) for number, unit in zip(batch.pairs, units, strict=True))


@functools.lru_cache(maxsize=64)
def _counted(model: Model, sequences: int, length: int, vocabulary: int | None, pairs: tuple[int, int, int] | None) -> int:
    """Count a model's operations, cached, since counting layer by layer takes a millisecond and batches come in few sizes."""
    return flops.step(model, sequences, seq_length=length, vocab_size=vocabulary, pairs=pairs).total.training


def _uncounted_attention(args: Any) -> Iterator[tuple[str, bool]]:
    """Symbol of each MLA (``+``) and sparse (``D``) layer that upstream counts wrongly, and whether it reuses indices."""
    if args.hybrid_layer_pattern is None:
        if args.experimental_attention_variant == "dsa":
            yield from (("D", shares) for shares in _sharing_of_gpt(args))
        return
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern

    parsed = parse_hybrid_pattern(args.hybrid_layer_pattern)
    trunk = (parsed.main_pattern or "").replace(Symbols.PIPE, "")
    # Layer numbers restart at 1 in each depth.
    for part in (trunk, *[parsed.mtp_pattern or ""] * parsed.mtp_num_depths):
        for number, symbol in enumerate(part, start=1):
            if symbol in "D+":
                yield symbol, is_periodically_shared(args, number)


def _sharing_of_gpt(args: Any) -> Iterator[bool]:
    """Return whether each DSA layer of a GPT reuses another's indices: trunk layers, then MTP layers, from 1 again."""
    from megacpp_mcore import patches

    schedule = plugin_config.index_schedule_from_environment()
    if schedule is not None and any(
        record["name"] == "dsa-index-cache" and record["state"] == "applied" for record in patches.status()
    ):
        yield from (role == "S" for role in schedule.roles(args.num_layers))
        yield from (False for _ in range(args.mtp_num_layers or 0))
        return
    yield from (is_periodically_shared(args, number) for number in range(1, args.num_layers + 1))
    for depth in range(1, (args.mtp_num_layers or 0) + 1):
        yield is_periodically_shared(args, 1 if args.mtp_use_repeated_layer else depth)


def _correction(args: Any, batch: _Batch, layers: list[tuple[str, bool]]) -> float:
    """Training FLOPs to add to upstream's count (negative: to subtract)."""
    mla, heads, hidden = _mla(args) if layers else None, args.num_attention_heads, args.hidden_size
    missing: float = sum(_core(args, batch, symbol, shares).training for symbol, shares in layers)
    if args.hybrid_layer_pattern is not None:
        missing += flops.product(batch.tokens * 2 * hidden**2).training * (args.mtp_num_layers or 0)
        if mla is not None:
            latent = args.q_lora_rank is not None
            projections = flops.mla_projections(batch.tokens, hidden, heads, mla, query_latent=latent)
            missing += projections.training * len(layers)
    elif mla is not None:
        # Upstream counts a GPT's projections, and for each layer a full core over half of the squared length.
        widths = mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim
        missing -= 3 * heads * widths * batch.squares * len(layers)
    return missing


def _core(args: Any, batch: _Batch, symbol: str, shares: bool) -> flops.Work:
    """Return the core of a ``+`` layer, or that of a ``D`` layer plus its indexer, unless it reuses other indices."""
    mla, heads = _mla(args), args.num_attention_heads
    if symbol == "+":
        return flops.full_core(batch.causal_pairs, heads, mla)
    selected = batch.selected_pairs(args.dsa_indexer_topk)
    core = flops.sparse_core(selected, heads, mla)
    return core if shares else core + _indexer(args, batch, selected)


def _indexer(args: Any, batch: _Batch, selected: int) -> flops.Work:
    trained = selected if args.dsa_indexer_use_sparse_loss else batch.causal_pairs
    return flops.indexer(
        batch.tokens,
        batch.causal_pairs,
        trained if args.dsa_indexer_loss_coeff else None,
        hidden=args.hidden_size,
        q_lora_rank=args.q_lora_rank,
        heads=args.dsa_indexer_n_heads,
        head_dim=args.dsa_indexer_head_dim,
    )


def _mla(args: Any) -> MLA:
    return MLA(
        q_lora_rank=args.q_lora_rank or 1,  # not read without a query latent
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
    )


PATCH = Patch(
    name="hybrid-flops",
    fixes=(
        "the log's TFLOP/s count a stock GPT instead of the spec's model; in hybrids D, + and the MTP projection count "
        "nothing; sparse attention counts as full, its indexer as nothing"
    ),
    source="megatron-core 0.19.2, megatron/training/training.py",
    edits=(
        Edit(
            "megatron.training.training:num_floating_point_operations",
            (
                "f9ed9b380e17ebd3e197a69b259bf69aa99fa5a41031503fa6d6e7e6b5118197",
                "a32d21cfdfc8617790a96c78c7c13a3cecdcb295f2a4cc057fd1120bf0f8318c",
            ),
            _audited_count,
        ),
        _observed,
        _closed,
    ),
    seam=(
        "num_floating_point_operations is the one count that the loop logs, sums up and writes to checkpoints; for packed "
        "documents it gets two sums from two functions, which now make two more"
    ),
    leaves_alone=(
        "everything that upstream counts right or that is not ours to audit: GPT with and without MLA, MoE or MTP, Mamba-2, "
        "gated delta net, all of it with upstream's conventions (no router, S²/2 pairs); what packed sequences cost in a loop "
        "that does not report their lengths: upstream's figure for DSA, one document a row for our models, each with a warning"
    ),
    gain="nam56r: 20.85 GFLOP a token of training, where upstream counts 45.55",
    retire_when="upstream counts by the layers of the model that was built",
    cost="microseconds on the host, twice a step; with packed rows one more all-reduce of two numbers",
)
