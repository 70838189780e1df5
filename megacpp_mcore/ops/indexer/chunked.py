"""Features of megatron-core's DSA indexer that ours lacks, in bounded memory: its masks, its top-k order, its KL losses.

Shape legend: S queries, R queries of one chunk, T keys, B batch, H indexer heads, D indexer head width, N selected keys
per query (top-k), A attention heads (of this rank), G key heads of the attention (1 or A), K attention head width.

Where the S × T pairs exceed a chunk (:data:`BLOCK_ELEMENTS`), no tensor has both a head dimension and all of them, and none
has B·S·T elements except the result of :func:`indexer_scores`. Nothing here synchronises with a GPU or copies from the host,
so a CUDA graph can capture all of it. Everything is plain PyTorch, except where Triton kernels support the inputs; they
allocate no tensor with a head dimension: scores (:attr:`Indexer.by_kernel`), targets (:meth:`Attention.by_kernel`), and,
where both apply, gradients (of the sparse loss, :attr:`Indexer.learns_by_kernel`). Scores and the gradient of the sparse
loss are those of ``reference.py``, which is the truth for causal masks; this module adds bounds by position, additive masks,
scores without ReLU, Megatron's key order, targets computed from the attention's query and key, and the dense loss.
Sources: DeepSeek-V3.2 report, equations 1 to 4; behaviour of megatron-core 0.19
``transformer/experimental_attention_variant/{dsa,dsa_masking,dsa_indexer_loss}.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from megacpp_mcore.backends import probes
from megacpp_mcore.backends.architectures import archs
from megacpp_mcore.backends.support import Support
from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, require_float
from megacpp_mcore.ops.indexer.reference import logits, score_block, selected_gradient, through_heads
from megacpp_mcore.ops.packed.documents import document_starts
from megacpp_mcore.ops.visibility import query_chunks

BLOCK_ELEMENTS = 2**24
"""Elements of a chunk's largest temporary: 64 MiB in float32. At most three tensors of that size are alive at once (and some
smaller ones without a head dimension), which bounds what a call needs in addition to its inputs, float32 copies of k and key,
and its results. A chunk has at least one query: if B·T·max(H, A) is more than this, that is the size."""

EPSILON = 1e-10
"""Smallest divisor of a probability and smallest argument of a logarithm, as in megatron-core's loss."""

Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over the ranks that hold the other attention heads, in place."""


@dataclass(frozen=True)
class KeyRule:
    """Which keys a query may select: those with a position in ``[start, end)``, or those where an additive mask is finite.

    Make one with :meth:`within`, :meth:`causal` or :meth:`additive`.
    """

    starts_S: torch.Tensor | None = None
    ends_S: torch.Tensor | None = None
    position_T: torch.Tensor | None = None
    mask_BST: torch.Tensor | None = None

    @classmethod
    def within(cls, starts_S: torch.Tensor, ends_S: torch.Tensor, position_T: torch.Tensor) -> KeyRule:
        """Keys with ``starts[i] <= position[j] < ends[i]`` for query i; integer tensors."""
        return cls(starts_S=starts_S, ends_S=ends_S, position_T=position_T)

    @classmethod
    def causal(cls, num_queries: int, num_keys: int, device: torch.device) -> KeyRule:
        """Keys 0..i for query i."""
        ends_S = torch.arange(1, num_queries + 1, device=device)
        return cls.within(torch.zeros_like(ends_S), ends_S, torch.arange(num_keys, device=device))

    @classmethod
    def additive(cls, mask: torch.Tensor) -> KeyRule:
        """Make a rule from ``mask``, [S, T] or [B, S, T]: it is added to scores, and keys are masked where it is not finite."""
        return cls(mask_BST=mask if mask.dim() == 3 else mask[None])

    def bias(self, rows: range) -> torch.Tensor | None:
        """Return the bias on the scores of ``rows``, ``[1 or B, R, T]``; None if keys are masked by position."""
        return None if self.mask_BST is None else self.mask_BST[:, rows.start : rows.stop]

    def valid(self, rows: range) -> torch.Tensor:
        """Return the keys that the queries at ``rows`` may select, bool ``[1 or B, R, T]``."""
        bias = self.bias(rows)
        return _inside(rows, *self._bounds())[None] if bias is None else bias.isfinite()

    def bias_at(self, rows: range, key_BRN: torch.Tensor) -> torch.Tensor | None:
        """:meth:`bias` at some keys of each query, ``[B, R, N]``."""
        bias = self.bias(rows)
        return None if bias is None else bias.expand(key_BRN.shape[0], -1, -1).gather(-1, key_BRN)

    def valid_at(self, rows: range, key_BRN: torch.Tensor) -> torch.Tensor:
        """:meth:`valid` at some keys of each query, ``[B, R, N]``."""
        bias = self.bias_at(rows, key_BRN)
        if bias is not None:
            return bias.isfinite()
        starts_S, ends_S, position_T = self._bounds()
        return _inside(rows, starts_S, ends_S, position_T[key_BRN])

    def apply_(self, score_BRT: torch.Tensor, rows: range) -> None:
        """Mask in ``score_BRT``, in place, the keys that the queries at ``rows`` may not select."""
        bias = self.bias(rows)
        if bias is None:
            score_BRT.masked_fill_(~self.valid(rows), float("-inf"))
        else:
            score_BRT.add_(bias)

    @cached_property
    def kernel_bounds(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return starts, ends and positions for the kernels."""
        starts_S, ends_S, position_T = (bound.int().contiguous() for bound in self._bounds())
        return starts_S, ends_S, position_T

    def _bounds(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.starts_S is None or self.ends_S is None or self.position_T is None:
            raise ModelError("a rule without a mask needs starts, ends and positions; make it with KeyRule.within")
        return self.starts_S, self.ends_S, self.position_T


def _inside(rows: range, starts_S: torch.Tensor, ends_S: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    starts, ends = (bound[rows.start : rows.stop, None] for bound in (starts_S, ends_S))
    return (position >= starts) & (position < ends)


@dataclass(frozen=True)
class Indexer:
    """Inputs of the indexer's scores: ``score[b, i, j] = Σ_h w[i, b, h] · relu(q[i, b, h] · k[j, b])``.

    Attributes:
        q_SBHD: indexer queries, rope applied.
        k_TBD: indexer keys, one for all heads, rope applied.
        w_SBH: head weights, scale included.
        relu: whether ``q·k`` goes through ReLU.
        kernel: whether the Triton kernel may compute the scores, where it supports the inputs.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """

    q_SBHD: torch.Tensor
    k_TBD: torch.Tensor
    w_SBH: torch.Tensor
    relu: bool = True
    kernel: bool = True

    def __post_init__(self) -> None:
        require_float(q_SBHD=self.q_SBHD, k_TBD=self.k_TBD, w_SBH=self.w_SBH)
        q, k, w = tuple(self.q_SBHD.shape), tuple(self.k_TBD.shape), tuple(self.w_SBH.shape)
        if len(q) != 4 or len(k) != 3 or w != q[:3] or k[1:] != (q[1], q[3]) or 0 in (*q, *k):
            raise ModelError(
                f"indexer q, k, w have shapes {q}, {k}, {w}, expected [S, B, H, D], [T, B, D], [S, B, H] with the same "
                "S, B, H and D and nothing empty; the indexer's key has no head dimension"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in: float32, or float64 if an input is."""
        return compute_dtype(self.q_SBHD, self.k_TBD, self.w_SBH)

    @property
    def by_kernel(self) -> bool:
        """Whether the Triton kernel computes :meth:`scores`: q and k of one 16-bit dtype on one GPU, ReLU, and its widths."""
        q, k, w = self.q_SBHD, self.k_TBD, self.w_SBH
        if (
            not (self.kernel and self.relu)
            or q.device != k.device
            or q.device != w.device
            or not _runs_kernels(q.device)
            or unfit("indexer")
        ):
            return False
        if q.dtype != k.dtype or q.dtype not in (torch.bfloat16, torch.float16) or self.dtype != torch.float32:
            return False
        from megacpp_mcore.ops.indexer.triton import SCORE_ALL

        return q.shape[-1] in SCORE_ALL

    @property
    def learns_by_kernel(self) -> bool:
        """Whether the Triton kernel computes the sparse loss's gradient, given that :meth:`Attention.by_kernel` is true."""
        if not self.by_kernel or unfit("indexer_grad"):
            return False
        from megacpp_mcore.ops.indexer.triton import HEAD_DIM, MOST_HEADS

        return self.q_SBHD.shape[-1] == HEAD_DIM and self.q_SBHD.shape[2] <= MOST_HEADS

    @cached_property
    def k_BTD(self) -> torch.Tensor:
        """The keys in the compute dtype."""
        return self.k_TBD.to(self.dtype).transpose(0, 1)

    def rows(self, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``q_BRHD`` and ``w_BRH`` of a chunk, in the compute dtype."""
        q, w = (tensor[rows.start : rows.stop].to(self.dtype).transpose(0, 1) for tensor in (self.q_SBHD, self.w_SBH))
        return q, w

    def chunks(self, elements_per_query: int, query_chunk: int | None) -> list[range]:
        """Split the queries into chunks, given ``elements_per_query`` of the largest temporary per query and batch row."""
        num_queries, batch = self.q_SBHD.shape[:2]
        return query_chunks(num_queries, batch * elements_per_query, BLOCK_ELEMENTS, query_chunk)

    @property
    def scored_elements(self) -> int:
        """Elements of the largest temporary of :meth:`scores`, its result included, for each query and batch row."""
        return len(self.k_TBD) * (1 if self.by_kernel else self.q_SBHD.shape[2])

    def scores(self, rows: range, out_BRT: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``score_BRT`` of a chunk, into ``out_BRT`` if passed.

        The kernel needs no temporary, and rows of ``out_BRT`` have stride T; PyTorch needs one of [B, R, H, T].
        """
        if not self.by_kernel:
            here = slice(rows.start, rows.stop)
            score_BRT = score_block(self.q_SBHD[here], self.k_BTD.transpose(0, 1), self.w_SBH[here], self.relu)
            return score_BRT if out_BRT is None else out_BRT.copy_(score_BRT)
        from megacpp_mcore.ops.indexer.triton import score_all

        (num_keys, batch), width = self.k_TBD.shape[:2], len(rows)
        made = self.q_SBHD.new_empty((batch, width, num_keys), dtype=self.dtype) if out_BRT is None else out_BRT
        score_all(made, self.q_SBHD, self.k_TBD, self.w_SBH, rows.start)
        return made


def unfit(*ops: str) -> str | None:
    """Return why kernels of ``ops`` (:mod:`megacpp_mcore.backends.architectures`) do not support this GPU; None: they do."""
    return _unfit_for(probes.arch(), ops)


@cache
def _unfit_for(arch: str | None, ops: tuple[str, ...]) -> str | None:
    reasons = ((op, Support(archs=archs(op)).foreign(arch)) for op in ops)
    return "; ".join(f"{op}: {reason}" for op, reason in reasons if reason) or None


def _runs_kernels(device: torch.device) -> bool:
    """Return whether Triton runs on this device."""
    return device.type == "cuda" and probes.requirement(probes.TRITON).ok


@dataclass(frozen=True)
class Attention:
    """The attention that the indexer learns from: its probabilities are the target.

    Attributes:
        query_SBAK: attention queries.
        key_TBGK: attention keys; one head (multi-query, as in absorbed MLA) or as many as queries.
        softmax_scale: factor on q·k before the softmax.
        reduce: all-reduces the target over the tensor-parallel ranks, in place, or None. All ranks must share the selection.
        kernel: whether the Triton kernels may compute targets, where they support the inputs.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """

    query_SBAK: torch.Tensor
    key_TBGK: torch.Tensor
    softmax_scale: float
    reduce: Reduce | None = None
    kernel: bool = True

    def __post_init__(self) -> None:
        require_float(query_SBAK=self.query_SBAK, key_TBGK=self.key_TBGK)
        query, key = tuple(self.query_SBAK.shape), tuple(self.key_TBGK.shape)
        fits = len(query) == 4 == len(key) and (key[1], key[3]) == (query[1], query[3]) and key[2] in (1, query[2])
        if not fits or 0 in (*query, *key):
            raise ModelError(
                f"attention query and key have shapes {query} and {key}, expected [S, B, A, K] and [T, B, 1 or A, K] "
                "with the same B and K and nothing empty"
            )

    def by_kernel(self, rule: KeyRule) -> bool:
        """Return whether the Triton kernels compute targets: query and key of one 16-bit dtype on one GPU, one key head, a
        supported width, and no additive mask."""
        query, key = self.query_SBAK, self.key_TBGK
        if not self.kernel or query.device != key.device or not _runs_kernels(query.device):
            return False
        if unfit("sparse_mla", "indexer_dense"):
            return False
        if rule.mask_BST is not None or query.dtype != key.dtype or key.shape[2] > 1 or self.softmax_scale <= 0:
            return False
        from megacpp_mcore.ops.sparse_mla.triton import DTYPES, WIDTHS

        return query.dtype in DTYPES and query.shape[-1] in dict(WIDTHS)

    def target_at(self, index_BSN: torch.Tensor) -> torch.Tensor:
        """Compute the target at the selected keys (int32, -1 = none) by the Triton kernel, in float32."""
        from megacpp_mcore.ops.sparse_mla.triton import WIDTHS, summed_probabilities

        query, key_TBK = self.query_SBAK, self.key_TBGK[:, :, 0]
        with torch.cuda.device_of(query):
            target = summed_probabilities(
                query, key_TBK, index_BSN, softmax_scale=self.softmax_scale, value_dim=dict(WIDTHS)[query.shape[-1]]
            )
        return self.normalised(target)

    def keys(self) -> torch.Tensor:
        """Return ``key_BGTK`` in the compute dtype."""
        return self.key_TBGK.to(compute_dtype(self.query_SBAK, self.key_TBGK)).permute(1, 2, 0, 3)

    def elements_per_query(self, topk: int | None) -> int:
        """Size of the temporaries of one query and batch row: over ``topk`` selected keys, or over all (None)."""
        (num_keys, _, key_heads, width), heads = self.key_TBGK.shape, self.query_SBAK.shape[2]
        if topk is None:
            return heads * num_keys
        return topk * (width + heads) if key_heads == 1 else heads * (num_keys + topk)

    def logits(self, key_BGTK: torch.Tensor, rows: range) -> torch.Tensor:
        """Compute ``logit_BRAT`` of a chunk over all keys, scaled."""
        query_BRAK = self.query_SBAK[rows.start : rows.stop].to(key_BGTK.dtype).transpose(0, 1)
        if key_BGTK.shape[1] == 1:
            return logits(query_BRAK, key_BGTK[:, 0]).mul_(self.softmax_scale)
        return (query_BRAK.transpose(1, 2) @ key_BGTK.transpose(2, 3)).mul_(self.softmax_scale).transpose(1, 2)

    def logits_at(self, key_BGTK: torch.Tensor, rows: range, at_BRN: torch.Tensor) -> torch.Tensor:
        """Compute ``logit_BRAN`` of a chunk over some keys of each query, scaled.

        With one key head the keys are gathered. With many heads that would cost A·K numbers per selected key, more than scoring
        every key as long as T < N·K, so there all keys are scored and the scores gathered.
        """
        if key_BGTK.shape[1] == 1:
            query_BRAK = self.query_SBAK[rows.start : rows.stop].to(key_BGTK.dtype).transpose(0, 1)
            return (query_BRAK @ _gather(key_BGTK[:, 0], at_BRN).transpose(2, 3)).mul_(self.softmax_scale)
        heads = self.query_SBAK.shape[2]
        return self.logits(key_BGTK, rows).gather(-1, at_BRN[:, :, None].expand(-1, -1, heads, -1))

    def target_(self, logit: torch.Tensor, valid: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the indexer's target: probabilities over the valid keys, summed over (all ranks') heads, L1-normalised.

        Args:
            logit: ``[B, R, A, keys]``; overwritten.
            valid: bool ``[1 or B, R, keys]``. A row without a valid key has target 0.
            bias: added to the logits first, shaped as ``valid``, or None.
        """
        if bias is not None:
            logit.add_(bias[:, :, None])
        hidden = ~valid[:, :, None]
        # The lowest finite number and not -inf: a row of -inf has NaN as its difference from its maximum.
        logit.masked_fill_(hidden, torch.finfo(logit.dtype).min)
        logit.sub_(logit.amax(dim=-1, keepdim=True)).exp_().masked_fill_(hidden, 0.0)
        return self.normalised(logit.div_(logit.sum(dim=-1, keepdim=True).clamp_min(EPSILON)).sum(dim=2))

    def normalised(self, target: torch.Tensor) -> torch.Tensor:
        """All-reduce ``target`` over ranks and L1-normalise it, in place."""
        if self.reduce is not None:
            self.reduce(target)
        return target.div_(target.sum(dim=-1, keepdim=True).clamp_min(EPSILON))


def _gather(k_BTD: torch.Tensor, at_BRN: torch.Tensor) -> torch.Tensor:
    """Gather the keys at ``at_BRN``, as ``k_BRND``."""
    return k_BTD[torch.arange(k_BTD.shape[0], device=at_BRN.device)[:, None, None], at_BRN]


def _divergence(target: torch.Tensor, score: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Compute ``KL(target ‖ softmax(score))`` of each row over its valid keys; 0 for a row without any."""
    score = score.masked_fill(~valid, torch.finfo(score.dtype).min)
    log_ratio = target.clamp_min(EPSILON).log_().sub_(score.log_softmax(dim=-1)).masked_fill_(~valid, 0.0)
    return log_ratio.mul_(target).sum(dim=-1)


@torch.no_grad()
def indexer_scores(indexer: Indexer, rule: KeyRule | None, *, query_chunk: int | None = None) -> torch.Tensor:
    """Return ``score_BST``, masked by ``rule`` (None: not masked), in the compute dtype, no gradient."""
    (num_queries, batch), num_keys = indexer.q_SBHD.shape[:2], indexer.k_TBD.shape[0]
    score_BST = indexer.k_TBD.new_empty((batch, num_queries, num_keys), dtype=indexer.dtype)
    for rows in indexer.chunks(indexer.scored_elements, query_chunk):
        chunk = indexer.scores(rows, score_BST[:, rows.start : rows.stop])
        if rule is not None:
            rule.apply_(chunk, rows)
    return score_BST


@torch.no_grad()
def select(
    indexer: Indexer, topk: int, rule: KeyRule | None, *, query_chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select each query's highest-scoring keys among those that ``rule`` allows (None: all).

    Args:
        indexer: inputs of the scores.
        topk: keys to select; values over T act as T.
        rule: which keys may be selected.
        query_chunk: queries per chunk, or None to choose (the result is the same except for rounding).

    Returns:
        score_BSN in the compute dtype, and index_BSN, int64; by descending score, ties in the order of ``torch.topk``. If a
        query may select fewer than N keys, its last scores are -inf and its last indices -1.

    Raises:
        ModelError: topk is below 1.
    """
    if topk < 1:
        raise ModelError(f"topk is {topk}, expected at least 1; each query must attend to something")
    (num_queries, batch), num_keys = indexer.q_SBHD.shape[:2], indexer.k_TBD.shape[0]
    best_BSN = indexer.k_TBD.new_empty((batch, num_queries, min(topk, num_keys)), dtype=indexer.dtype)
    index_BSN = torch.empty_like(best_BSN, dtype=torch.int64)
    # A top-k over few rows leaves most of a GPU idle, so the scores of several chunks go through one.
    gathered = indexer.chunks(num_keys, query_chunk)
    buffer_BRT = best_BSN.new_empty((batch, len(gathered[0]), num_keys))
    chunk = len(indexer.chunks(indexer.scored_elements, query_chunk)[0])
    for rows in gathered:
        score_BRT = buffer_BRT[:, : len(rows)]
        for first in range(rows.start, rows.stop, chunk):
            part = range(first, min(first + chunk, rows.stop))
            indexer.scores(part, score_BRT[:, part.start - rows.start : part.stop - rows.start])
        if rule is not None:
            rule.apply_(score_BRT, rows)
        best, index = score_BRT.topk(min(topk, num_keys), dim=-1)
        best_BSN[:, rows.start : rows.stop] = best
        index_BSN[:, rows.start : rows.stop] = index.masked_fill_(best == float("-inf"), -1)
    return best_BSN, index_BSN


@torch.no_grad()
def sparse_divergence(
    attention: Attention,
    best_BSN: torch.Tensor,
    index_BSN: torch.Tensor,
    rule: KeyRule,
    *,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """``KL(target ‖ softmax(score))`` over each query's selected keys; DeepSeek-V3.2 report, equation 4.

    Args:
        attention: defines the target.
        best_BSN: scores of the selected keys.
        index_BSN: the selected keys, int64, -1 = none.
        rule: which of them count; its bias is added to both sides.
        query_chunk: as for :func:`select`.

    Returns:
        divergence_BS in the compute dtype, no gradient; 0 for a query without any key.
    """
    batch, num_queries, _ = index_BSN.shape
    divergence_BS = best_BSN.new_empty((batch, num_queries))
    targets, per_query = _targets(attention, index_BSN, rule)
    for rows in query_chunks(num_queries, batch * per_query, BLOCK_ELEMENTS, query_chunk):
        index, target, bias = targets(rows)
        best = best_BSN[:, rows.start : rows.stop]
        score = best if bias is None else best + bias
        divergence_BS[:, rows.start : rows.stop] = _divergence(target, score, index >= 0)
    return divergence_BS


@torch.no_grad()
def dense_divergence(
    indexer: Indexer,
    attention: Attention,
    rules: tuple[KeyRule | None, KeyRule],
    *,
    query_chunk: int | None = None,
) -> torch.Tensor:
    """``KL(target ‖ softmax(score))`` over all keys that a query sees; DeepSeek-V3.2 report, equation 3.

    Args:
        indexer: inputs of the scores.
        attention: defines the target.
        rules: the rule of the selection, and the rule of the loss; the scores go through both, the target through the latter.
        query_chunk: as for :func:`select`.

    Returns:
        divergence_BS in the compute dtype, no gradient; 0 for a query without any key.
    """
    num_queries, batch = indexer.q_SBHD.shape[:2]
    divergence_BS = indexer.k_TBD.new_empty((batch, num_queries), dtype=indexer.dtype)
    targets, per_query = _dense_targets(attention, rules[1])
    for rows in indexer.chunks(max(indexer.scored_elements, per_query), query_chunk):
        valid = rules[1].valid(rows)
        target = targets(rows, valid)
        score_BRT = indexer.scores(rows)
        for rule in rules:
            if rule is not None:
                rule.apply_(score_BRT, rows)
        divergence_BS[:, rows.start : rows.stop] = _divergence(target, score_BRT, valid)
    return divergence_BS


DenseTargets = Callable[[range, torch.Tensor], torch.Tensor]
"""The target of a chunk's queries over all keys, given which are valid."""


def _dense_targets(attention: Attention, rule: KeyRule) -> tuple[DenseTargets, int]:
    """Return the dense targets of chunks, and the size of their temporaries for one query and batch row."""
    if attention.by_kernel(rule):
        from megacpp_mcore.ops.indexer import dense

        query, key_TBK = attention.query_SBAK, attention.key_TBGK[:, :, 0]
        how = rule.kernel_bounds, attention.softmax_scale
        with torch.cuda.device_of(query):
            lse_BAS = dense.denominators(query, key_TBK, *how)

        def made(rows: range, _: torch.Tensor) -> torch.Tensor:
            with torch.cuda.device_of(query):
                return attention.normalised(dense.summed_probabilities(query, key_TBK, lse_BAS, *how, rows))

        return made, 2 * len(key_TBK)  # without a head dimension these are the largest temporaries, six of them
    key_BGTK = attention.keys()

    def of(rows: range, valid: torch.Tensor) -> torch.Tensor:
        return attention.target_(attention.logits(key_BGTK, rows), valid, rule.bias(rows))

    return of, attention.elements_per_query(None)


Targets = Callable[[range], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
"""For a chunk's queries: the selected keys that count (others are -1), the target at them, and their bias."""


def _targets(attention: Attention, index_BSN: torch.Tensor, rule: KeyRule) -> tuple[Targets, int]:
    """Return the targets of chunks, and the size of their temporaries for one query and batch row."""
    num_queries, topk = index_BSN.shape[1:]

    def selected(rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index = index_BSN[:, rows.start : rows.stop]
        at = index.clamp_min(0).long()
        valid = (index >= 0) & rule.valid_at(rows, at)
        return at, at.masked_fill(~valid, -1), valid

    if attention.by_kernel(rule):
        kept_BSN = torch.empty_like(index_BSN, dtype=torch.int32)
        for rows in query_chunks(num_queries, 4 * len(index_BSN) * topk, BLOCK_ELEMENTS, None):
            kept_BSN[:, rows.start : rows.stop] = selected(rows)[1]
        target_BSN = attention.target_at(kept_BSN)

        def made(rows: range) -> tuple[torch.Tensor, torch.Tensor, None]:
            here = slice(rows.start, rows.stop)
            return kept_BSN[:, here], target_BSN[:, here], None

        return made, topk
    key_BGTK = attention.keys()

    def of(rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        at, saved, valid = selected(rows)
        bias = rule.bias_at(rows, at)
        return saved, attention.target_(attention.logits_at(key_BGTK, rows, at), valid, bias), bias

    return of, attention.elements_per_query(topk)


@dataclass
class _Gradients:
    """Accumulators of the indexer's gradients: q and w in their own dtypes, k in the compute dtype, as a sum of parts."""

    q_SBHD: torch.Tensor
    w_SBH: torch.Tensor
    k_PBTD: torch.Tensor

    @classmethod
    def of(cls, indexer: Indexer, by_kernel: bool) -> _Gradients:
        parts = 1
        if by_kernel:
            from megacpp_mcore.ops.indexer.dense import PARTS as parts
        length, batch, width = indexer.k_TBD.shape
        k_PBTD = indexer.k_TBD.new_zeros((parts, batch, length, width), dtype=indexer.dtype)
        q_SBHD, w_SBH = (tensor.new_empty(tensor.shape) for tensor in (indexer.q_SBHD, indexer.w_SBH))
        return cls(q_SBHD, w_SBH, k_PBTD)

    def add(self, indexer: Indexer, grad_BRT: torch.Tensor, weight_BS: torch.Tensor, rule: KeyRule, rows: range) -> None:
        """Write the gradients of a chunk's q and w, and accumulate that of k, by the Triton kernels."""
        from megacpp_mcore.ops.indexer.dense import add_gradients

        given = indexer.q_SBHD, indexer.k_TBD, indexer.w_SBH, weight_BS.float().contiguous(), rule.kernel_bounds
        with torch.cuda.device_of(grad_BRT):
            add_gradients(grad_BRT, *given, rows, (self.q_SBHD, self.w_SBH, self.k_PBTD))

    def put(self, rows: range, q_BRHD: torch.Tensor, w_BRH: torch.Tensor) -> None:
        """Write the gradients of a chunk's q and w."""
        self.q_SBHD[rows.start : rows.stop] = q_BRHD.transpose(0, 1)
        self.w_SBH[rows.start : rows.stop] = w_BRH.transpose(0, 1)

    def result(self, indexer: Indexer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_SBHD, self.w_SBH, self.k_PBTD.sum(0).transpose(0, 1).to(indexer.k_TBD.dtype).contiguous()


@torch.no_grad()
def sparse_backward(
    indexer: Indexer,
    attention: Attention,
    index_BSN: torch.Tensor,
    rule: KeyRule,
    weight: torch.Tensor,
    rows_BS: torch.Tensor | None = None,
    *,
    query_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of ``Σ weight · rows[b, i] · KL[b, i]`` over the selected keys; other keys have none.

    The gradient of k is summed in no fixed order on a GPU, unless ``torch.use_deterministic_algorithms(True)``.

    Args:
        indexer: inputs of the scores.
        attention: defines the target, a constant here.
        index_BSN: the selected keys, int64, -1 = none.
        rule: which of them count; its bias is added to both sides.
        weight: the loss's gradient with respect to the divergence of a query that counts, a one-element tensor.
        rows_BS: 1 for queries that count, 0 for others; None: all count.
        query_chunk: as for :func:`select`.

    Returns:
        grad_q_SBHD, grad_w_SBH and grad_k_TBD in the dtypes of q, w and k.
    """
    (batch, num_queries, topk), (targets, per_query) = index_BSN.shape, _targets(attention, index_BSN, rule)
    if attention.by_kernel(rule) and indexer.learns_by_kernel:
        from megacpp_mcore.ops.indexer.triton import indexer_grad

        kept_BSN, target_BSN, _ = targets(range(num_queries))
        counted = target_BSN if rows_BS is None else target_BSN * rows_BS[:, :, None]  # without a target, no gradient
        inputs = indexer.q_SBHD, indexer.k_TBD, indexer.w_SBH
        with torch.cuda.device_of(indexer.q_SBHD):
            _, grad_q_SBHD, grad_k_TBD, grad_w_SBH = indexer_grad(*inputs, kept_BSN, counted, weight * (batch * num_queries))
        return grad_q_SBHD, grad_w_SBH, grad_k_TBD
    weight_BS = weight.to(indexer.dtype).expand(batch, num_queries)
    weight_BS = weight_BS if rows_BS is None else weight_BS * rows_BS

    def selected(rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        saved, target, bias = targets(rows)
        return saved, target, weight_BS[:, rows.start : rows.stop], bias

    chunks = indexer.chunks(max(per_query, topk * sum(indexer.q_SBHD.shape[2:])), query_chunk)
    _, grad_q_SBHD, grad_k_TBD, grad_w_SBH = selected_gradient(
        indexer.q_SBHD, indexer.k_TBD, indexer.w_SBH, selected, chunks, relu=indexer.relu
    )
    return grad_q_SBHD, grad_w_SBH, grad_k_TBD


@torch.no_grad()
def dense_backward(
    indexer: Indexer,
    attention: Attention,
    rule: KeyRule,
    weight_BS: torch.Tensor,
    *,
    query_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute divergences over all keys that a query sees, and the gradients of ``Σ weight[b, i] · KL[b, i]``.

    Returns divergence_BS in the compute dtype, then the gradients; other arguments and gradients as in :func:`sparse_backward`.
    """
    heads, num_keys = indexer.q_SBHD.shape[2], indexer.k_TBD.shape[0]
    by_kernel = indexer.by_kernel and attention.by_kernel(rule)
    gradients, (targets, per_query) = _Gradients.of(indexer, by_kernel), _dense_targets(attention, rule)
    divergence_BS = indexer.k_TBD.new_empty(weight_BS.shape, dtype=indexer.dtype)
    for rows in indexer.chunks(per_query if by_kernel else max(num_keys * heads, per_query), query_chunk):
        valid = rule.valid(rows)
        target = targets(rows, valid)
        score_BRT = indexer.scores(rows)
        rule.apply_(score_BRT, rows)
        divergence_BS[:, rows.start : rows.stop] = _divergence(target, score_BRT, valid)
        grad_BRT = score_BRT.masked_fill_(~valid, torch.finfo(score_BRT.dtype).min).softmax(dim=-1).sub_(target)
        if by_kernel:
            gradients.add(indexer, grad_BRT.masked_fill_(~valid, 0.0), weight_BS, rule, rows)
            continue
        grad_BRT.mul_(weight_BS[:, rows.start : rows.stop, None]).masked_fill_(~valid, 0.0)
        q_BRHD, w_BRH = indexer.rows(rows)
        logit_BRHT, grad_w_BRH = through_heads(logits(q_BRHD, indexer.k_BTD), w_BRH, grad_BRT, indexer.relu)
        grad_logit_BXT = logit_BRHT.flatten(1, 2)
        gradients.put(rows, (grad_logit_BXT @ indexer.k_BTD).unflatten(1, q_BRHD.shape[1:3]), grad_w_BRH)
        gradients.k_PBTD[0].baddbmm_(grad_logit_BXT.transpose(1, 2), q_BRHD.flatten(1, 2))
    return divergence_BS, *gradients.result(indexer)


@torch.no_grad()
def dense_grad(
    q_SBHD: torch.Tensor,
    k_SBD: torch.Tensor,
    w_SBH: torch.Tensor,
    query_SBAK: torch.Tensor,
    key_SB1K: torch.Tensor,
    *,
    weight: torch.Tensor,
    softmax_scale: float,
    seq_idx_S: torch.Tensor | None = None,
    positions_S: torch.Tensor | None = None,
    reduce: Reduce | None = None,
    query_chunk: int | None = None,
    kernel: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the loss and gradients of the dense warm-up stage: KL of each query over every causal key of its document.

    Source: DeepSeek-V3.2 report, equation 3.

    Args:
        q_SBHD, k_SBD, w_SBH: inputs of the indexer's scores.
        query_SBAK, key_SB1K: the attention that it learns, absorbed.
        weight: factor on the gradient of each query's divergence, a one-element tensor.
        softmax_scale: of the attention.
        seq_idx_S: document number of each key, the same for the whole batch; None: one document.
        positions_S: row of each query among the keys, if the queries are not the keys' rows.
        reduce: all-reduces the target over the tensor-parallel ranks, in place.
        query_chunk: as for :func:`select`.
        kernel: as for :class:`Indexer` and :class:`Attention`.

    Returns:
        divergence_BS in the compute dtype, and dq_SBHD, dk_SBD and dw_SBH in the dtypes of q, k and w.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    indexer = Indexer(q_SBHD, k_SBD, w_SBH, kernel=kernel)
    attention = Attention(query_SBAK, key_SB1K, softmax_scale, reduce, kernel)
    rows, batch = q_SBHD.shape[:2]
    keys_T = torch.arange(len(k_SBD), device=q_SBHD.device)
    positions_S, starts_T = keys_T if positions_S is None else positions_S, torch.zeros_like(keys_T)
    if seq_idx_S is not None:
        starts_T = torch.where(document_starts(seq_idx_S[None], batch=1, rows=len(keys_T))[0], keys_T, 0).cummax(0).values
    rule = KeyRule.within(starts_T[positions_S], positions_S + 1, keys_T)
    weight_BS = weight.to(indexer.dtype).expand(batch, rows)
    divergence_BS, dq, dw, dk = dense_backward(indexer, attention, rule, weight_BS, query_chunk=query_chunk)
    return divergence_BS, dq, dk, dw
