"""Every benchmark by name: what it measures, with which sizes; imports no torch.

Sizes: B batch, S sequence; the others have their names in :class:`megacpp_mcore.model.Model`, abridged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model import Model, preset
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families.mamba_family import wide_width
from megacpp_mcore.util.nearest import nearest

OP, LAYER = "op", "layer"
KINDS = (OP, LAYER)
"""What a benchmark measures; whole models are measured by the scripts in a clone's folder ``experiments``."""

OURS, PEER, BOUND = "ours", "peer", "bound"
"""The sides: this package, a third party, and a part of the work that is timed for orientation."""

FULL, TINY = "full", "tiny"
SIZES = (FULL, TINY)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a benchmark is run, on ``cuda`` or ``cpu``.

    Attributes:
        dtype: of the inputs, by torch's name.
        seconds: how long the calls of one figure are timed.
        without: skip peers with any of these in their names.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    shape: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 1.0
    without: tuple[str, ...] = ()

    def sizes(self, *names: str) -> list[int]:
        """Return the sizes with these names."""
        return [self.shape[name] for name in names]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One benchmark.

    Attributes:
        kind: one of :data:`KINDS`.
        covers: the op, or the layer's letter and role.
        problem: ``module:function`` in :mod:`megacpp_mcore.bench.cases` that makes the problem from :class:`Options`.
        shapes: sizes by name, for each size of the benchmark.
    """

    name: str
    kind: str
    covers: str
    title: str
    problem: str
    shapes: Mapping[str, Mapping[str, int]]

    def shape(self, size: str, changes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of ``size`` with ``changes``.

        Raises:
            BenchmarkError: a change names a size that this benchmark does not have, or is not a positive number.
        """
        sizes = self.shapes[size]
        for name, value in changes.items():
            if name not in sizes:
                raise BenchmarkError(f"{self.name} has no size {name!r}; expected one of {', '.join(sizes)}")
            if value < 1:
                raise BenchmarkError(f"size {name} is {value}; expected 1 or more")
        return {**sizes, **changes}


def _sizes(model: Model) -> dict[str, int]:
    mla, dsa, ssm, rnn, moe = model.mla, model.dsa, model.mamba3, model.m2rnn, model.moe
    return {
        "heads": model.heads, "qk": mla.qk_head_dim + mla.qk_pos_emb_head_dim, "v": mla.v_head_dim, "latent": mla.kv_lora_rank,
        "query_latent": mla.q_lora_rank, "rope": mla.qk_pos_emb_head_dim, "topk": dsa.topk,
        "indexer_heads": dsa.indexer_heads, "indexer_dim": dsa.indexer_head_dim, "mamba_heads": model.mamba_heads,
        "head_dim": ssm.head_dim, "state": ssm.state, "rank": ssm.mimo_rank, "groups": ssm.groups, "chunk": ssm.chunk,
        "rnn_heads": model.recurrent_heads, "key_dim": rnn.key_dim, "value_dim": rnn.value_dim,
        "checkpoint_every": rnn.checkpoint_every, "experts": moe.experts, "routed": moe.topk,
        "wide": wide_width(model.hidden_size, ssm), "narrow": 3 * model.mamba_heads + ssm.angles,
        "expert_width": moe.ffn_hidden_size, "hidden": model.hidden_size, "vocab": model.vocab_size_padded(1),
        "ffn": model.ffn_hidden_size,
    }  # fmt: skip


_MODELS = {
    FULL: _sizes(preset("nam56r")) | {"B": 2, "S": 4096},
    TINY: _sizes(preset("nam56r_tiny")) | {"B": 2, "S": 24},
}


def _op(
    name: str, module: str, title: str, names: str, *, covers: str = "", kind: str = OP, **changes: Mapping[str, int]
) -> Benchmark:
    """Make a benchmark of an op, whose problem has the op's name, at sizes ``names`` with ``changes``."""
    all_sizes = {size: {**sizes, **changes.get(size, {})} for size, sizes in _MODELS.items()}
    shapes = {size: {dim: sizes[dim] for dim in ("B", "S", *names.split())} for size, sizes in all_sizes.items()}
    problem = f"{module}_benchmark:{name if kind == LAYER else covers or name}"
    return Benchmark(name=name, kind=kind, covers=covers or name, title=title, problem=problem, shapes=shapes)


_layer = partial(_op, module="layers", names="hidden", kind=LAYER)
_MAMBA3 = "mamba_heads head_dim state rank groups chunk"
_SISO = {"rank": 1, "groups": 1}
_INDEXER = "indexer_heads indexer_dim"
_EXPERTS = "experts routed hidden expert_width"

BENCHMARKS: Mapping[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        _op("mla", "mla", "core attention of full MLA; stock's, also with the patch mla-core-attention", "heads qk v"),
        _op("mla_packed", "mla", "core attention of full MLA in rows of several documents", "heads qk v documents",
            covers="mla", full={"B": 1, "S": 8192, "documents": 8}, tiny={"documents": 3}),
        _op("mla_window", "mla", "core attention of full MLA in a window", "heads qk v window",
            covers="mla", full={"B": 1, "S": 16384, "window": 4095}, tiny={"window": 17}),
        _op("sparse_mla", "dsa", "absorbed attention to selected keys", "heads latent rope topk"),
        _op("indexer", "dsa", "selection of keys by the DSA indexer", f"{_INDEXER} topk"),
        _op("indexer_grad", "dsa", "gradient of the DSA indexer's loss", f"{_INDEXER} topk"),
        _op("mla_latents", "mla", "MLA's down-projections and the norms of its latents",
            "query_latent latent rope hidden"),
        _op("mla_projection", "mla", "queries of sparse MLA: absorption and rotary embedding",
            "heads qk latent rope"),
        _op("mla_keys", "mla", "keys and values of full MLA", "heads qk v rope"),
        _op("indexer_inputs", "mla", "what the DSA indexer's scores are made of",
            f"{_INDEXER} query_latent hidden"),
        _op("mamba3", "recurrence", "Mamba-3, MIMO, between its projections", _MAMBA3),
        _op("mamba3_siso", "recurrence", "Mamba-3, SISO, between its projections", _MAMBA3, covers="mamba3",
            full=_SISO | {"chunk": 64}, tiny=_SISO),
        _op("mamba3_projection", "linear", "the input projection of a Mamba-3 mixer", "hidden wide narrow"),
        _op("feed_forward", "linear", "the dense feed-forward layer of MTP", "hidden ffn"),
        _op("m2rnn", "recurrence", "the M²RNN recurrence", "rnn_heads key_dim value_dim checkpoint_every"),
        _op("grouped_mlp", "experts", "routed experts, two matrices each, rows sorted by expert", _EXPERTS),
        _op("routed_mlp", "experts", "the same with the gather of tokens' rows and the sum of each token's", _EXPERTS),
        _op("rms_norm", "linear", "the norm that a layer begins with, and its residual", "hidden"),
        _op("router", "experts", "from logits to probabilities, routing and losses", "experts routed"),
        _op("linear_cross_entropy", "linear",
            "output layer and its loss; stock's, and with the patch of this name", "hidden vocab"),
        _layer("layer_a_full", covers="A" + grammar.FULL_ATTENTION, title="A layer, full MLA"),
        _layer("layer_a_full_dsa", covers="A" + grammar.FULL_INDEX, title="A layer, sparse MLA with an indexer (Full)"),
        _layer("layer_a_shared_dsa", covers="A" + grammar.SHARED_INDEX, title="A layer, sparse MLA, shared indices (Shared)"),
        _layer("layer_m", covers="M", title="M layer, Mamba-3"),
        _layer("layer_e", covers="E", title="E layer, mixture of experts"),
        _layer("layer_r", covers="R", title="R layer, M²RNN"),
        _layer("mtp_block", covers="mtp", title="one depth of multi-token prediction, without its head"),
    )
}  # fmt: skip


def select(words: Sequence[str], *, all_of_them: bool = False) -> list[Benchmark]:
    """Return the benchmarks named in ``words``, by name or by kind, each once and in catalog order.

    Raises:
        BenchmarkError: a word is neither, or nothing is named.
    """
    if bool(words) == all_of_them:
        raise BenchmarkError(f"name benchmarks or kinds ({', '.join(KINDS)}), or pass --all, not both")
    for word in words:
        if word not in BENCHMARKS and word not in KINDS:
            raise BenchmarkError(f"there is no benchmark {word!r}; {nearest(word, [*BENCHMARKS, *KINDS])}")
    return [b for b in BENCHMARKS.values() if all_of_them or b.name in words or b.kind in words]
