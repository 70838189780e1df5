"""Which rows of a sequence belong to one document: from packed sequence lengths or from Megatron's attention mask, and back.

``seq_idx_BS`` holds the document number of every row, int32, like mamba-ssm's argument of that name: the rows of a document are
consecutive, and no information crosses documents. It is built once per micro-batch, on the device, and is the only
form in which ops receive documents; an op that needs another form (:func:`cu_seqlens_of`, :func:`additive_mask`) derives it
once, shared by all layers (:func:`shared`).

Nothing here makes the host wait for a GPU, unless a function documents it. Values on a GPU (numbers of a packed batch,
entries of a mask) are checked there: an invalid one aborts the process soon after, by a device-side assertion that prints what
was expected. On a CPU a ModelError says what was found, and where.

Legend: B batch, S rows. ``cu_seqlens`` is described in :mod:`megacpp_mcore.ops.packed.positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from megacpp_mcore.errors import DataError, ModelError
from megacpp_mcore.ops.visibility import check_mask

_SHARED = "_megacpp_shared"


def shared[Made](tensor: torch.Tensor, form: Hashable, make: Callable[[], Made]) -> Made:
    """Return ``make()``, called once per content of ``tensor``, no matter how many layers need this ``form`` of it.

    The result is cached on the tensor's storage: it is shared by the aliases that activation recompute passes to a layer, and
    freed with the storage. In-place writes invalidate it, except for a tensor created in inference mode, which has no version
    counter. Results made in inference mode, which autograd cannot save, are used only there. A CUDA graph under capture makes
    its own.

    Args:
        tensor: one that Megatron creates for every micro-batch, or derived from one.
        form: key of the result, including everything else that it depends on.
        make: its result must not reference the memory of ``tensor`` itself, which would then never be freed.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    held = vars(tensor.untyped_storage()).setdefault(_SHARED, {})
    key = (form, torch.is_inference_mode_enabled(), tensor.storage_offset(), tensor.shape, tensor.stride())
    version = 0 if tensor.is_inference() else tensor._version
    if key not in held or held[key][0] != version:
        held[key] = version, make()
    made: Made = held[key][1]
    return made


def _require(holds: torch.Tensor, what: str, explain: Callable[[], str]) -> None:
    """Raise ModelError with ``explain()`` unless the scalar bool ``holds``; on a GPU, without a sync, abort the process later.

    The assertion there prints ``what``, at most 254 characters.
    """
    try:
        torch._assert_async(holds, what)
    except RuntimeError as error:  # on a CPU
        raise ModelError(explain()) from error


def seq_idx_from_cu_seqlens(cu_seqlens: torch.Tensor, num_rows: int, of_keys: torch.Tensor | None = None) -> torch.Tensor:
    """Assign a document number to each token of a packed batch: int32 ``[1, num_rows]``.

    Rows after the last sequence (padding) form a separate document.

    Args:
        cu_seqlens: first row of each sequence and the end of the last one, ``[N + 1]``, integers.
        num_rows: rows of the packed batch.
        of_keys: the same for the keys, if queries and keys have separate ones.

    Raises:
        ModelError: ``cu_seqlens`` or ``of_keys`` is not a vector of two or more integers, or they differ in length; on a CPU
            also: their numbers differ, do not start at 0, decrease, or exceed the number of rows.
    """
    _check_cu_seqlens(cu_seqlens, num_rows)
    if of_keys is not None and of_keys is not cu_seqlens:
        _check_cu_seqlens(of_keys, num_rows)
        check_same_sequences(cu_seqlens, of_keys)
        _require(
            (cu_seqlens == of_keys).all(),
            "queries and keys are of the same sequences",
            lambda: (
                f"cu_seqlens is {_abridged(cu_seqlens)} of queries and {_abridged(of_keys)} of keys; expected the same, as in "
                "self-attention"
            ),
        )
    row = torch.arange(num_rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True, out_int32=True)[None]


def _check_cu_seqlens(cu_seqlens: torch.Tensor, num_rows: int) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ModelError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}, expected integers [N + 1]: the first row of each "
            "of N ≥ 1 sequences and the end of the last"
        )
    in_order = (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= num_rows) & (cu_seqlens.diff() >= 0).all()
    _require(
        in_order,
        "cu_seqlens begins with 0, never decreases and ends with the rows",
        lambda: (
            f"cu_seqlens is {_abridged(cu_seqlens)}, expected first rows that begin with 0, never decrease, and end with at "
            f"most the {num_rows} rows of the packed batch"
        ),
    )


def check_same_sequences(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Raise ModelError unless both ``cu_seqlens`` have the same number of sequences; the values are not read."""
    if queries.shape != keys.shape:
        raise ModelError(
            f"{queries.numel() - 1} packed sequences of queries and {keys.numel() - 1} of keys; expected the same, as in "
            "self-attention"
        )


def _abridged(cu_seqlens: torch.Tensor) -> str:
    first = ", ".join(map(str, cu_seqlens[:8].tolist()))
    return f"[{first}, …, {int(cu_seqlens[-1])}]" if cu_seqlens.numel() > 8 else f"[{first}]"


def fixed_cu_seqlens(cu_seqlens_BN: torch.Tensor, *, rows: int, max_documents: int) -> torch.Tensor:
    """Join the documents of a micro-batch into one row, in a vector of data-independent length.

    Args:
        cu_seqlens_BN: per sample, padded with ``rows``, as Megatron's GPTDataset returns it; on the CPU.
        rows: rows per sample.
        max_documents: upper bound on the documents of all samples together.

    Returns:
        int32 ``[max_documents + 1]``: first rows, then B · ``rows``, the end of the last, repeated to the end.

    Raises:
        DataError: the samples hold more documents.
    """
    samples = len(cu_seqlens_BN)
    starts_BN = cu_seqlens_BN[:, :-1] + rows * torch.arange(samples, dtype=torch.int32)[:, None]
    starts = starts_BN[cu_seqlens_BN[:, :-1] < rows]
    check_count(len(starts), samples * rows, max_documents)
    fixed = torch.full((max_documents + 1,), samples * rows, dtype=torch.int32)
    fixed[: len(starts)] = starts
    return fixed


def default_max_documents(rows: int) -> int:
    """Return the default upper bound on the documents in ``rows`` tokens: one per 16 tokens, at least 64."""
    return max(64, rows // 16)


def check_count(documents: int, rows: int, max_documents: int) -> None:
    """Raise DataError if a row of ``rows`` tokens has more ``documents`` than ``max_documents``."""
    if documents > max_documents:
        raise DataError(
            f"the data loader packed {documents} documents into a row of {rows} tokens, expected at most {max_documents}: "
            f"join short documents in the data, or set max_documents: {documents} in the file of MEGACPP_CONFIG"
        )


def check_masked_count(attention_mask: torch.Tensor, max_documents: int) -> None:
    """Raise DataError if a row of a mask ``[B, 1, S, S]``, made by ``--reset-attention-mask``, has more documents.

    The host reads the mask, so call this before it is moved to a GPU.
    """
    most = int(attention_mask[:, 0].diagonal(-1, 1, 2).sum(1).max()) + 1
    check_count(most, attention_mask.shape[-1], max_documents)


def seq_idx_from_mask(attention_mask: torch.Tensor, *, wait: bool = False) -> torch.Tensor:
    """Assign numbers to the documents that Megatron's mask separates: int32 ``[B, S]``.

    The mask must be exactly that of ``--reset-attention-mask``: row i sees row j ≤ i if both are in one document. This is
    checked.

    Args:
        attention_mask: bool ``[B, 1, S, S]``, True = masked.
        wait: whether to synchronise with a GPU, so that a wrong mask is a ModelError there, too.

    Raises:
        ModelError: the mask does not correspond to any numbering of documents.
    """
    if attention_mask.dim() != 4 or attention_mask.shape[2] != attention_mask.shape[3] or not attention_mask.shape[2]:
        raise ModelError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected [B, 1, S, S]; this layer reads the documents of "
            "a row from it"
        )
    batch, _, rows, _ = attention_mask.shape
    check_mask(attention_mask, batch=batch, num_queries=rows, num_keys=rows)
    hidden_BSS = attention_mask[:, 0]
    starts_BS = torch.nn.functional.pad(hidden_BSS.diagonal(-1, 1, 2), (1, 0))
    seq_idx_BS = starts_BS.cumsum(1, dtype=torch.int32)
    future_SS = torch.ones(rows, rows, dtype=torch.bool, device=attention_mask.device).triu(1)
    differs_BSS = hidden_BSS != (other_documents(seq_idx_BS)[:, 0] | future_SS)

    def explain() -> str:
        b, i, j = differs_BSS.nonzero()[0].tolist()
        state = "masked" if bool(hidden_BSS[b, i, j]) else "visible"
        return (
            f"attention_mask[{b}, 0, {i}, {j}] is {state}, which neither causality nor documents explain; expected a causal "
            "mask reset at each document's first row (--reset-attention-mask): a layer with a state supports no other mask"
        )

    if not wait:
        _require(~differs_BSS.any(), "the mask is causal and reset by documents", explain)
    elif bool(differs_BSS.any()):
        raise ModelError(explain(), code="masked")
    return seq_idx_BS


def require_one_document(seq_idx_BS: torch.Tensor, explain: Callable[[], str], *, wait: bool = False) -> None:
    """Raise ModelError with ``explain()`` unless every row is one document; ``wait`` as in :func:`seq_idx_from_mask`."""
    one = (seq_idx_BS == seq_idx_BS[:, :1]).all()
    if not wait:
        _require(one, "a row is one document", explain)
    elif not bool(one):
        raise ModelError(explain())


def document_starts(seq_idx_BS: torch.Tensor, *, batch: int, rows: int) -> torch.Tensor:
    """Return which rows start a document, except the first: bool ``[B, S]``, False in the first row.

    Raises:
        ModelError: ``seq_idx_BS`` is not an int32 tensor ``[B, S]``.
    """
    check_seq_idx(seq_idx_BS, batch=batch, rows=rows)
    return torch.nn.functional.pad(seq_idx_BS[:, 1:] != seq_idx_BS[:, :-1], (1, 0))


def check_seq_idx(seq_idx_BS: torch.Tensor, *, batch: int, rows: int) -> None:
    """Raise ModelError unless ``seq_idx_BS`` is int32 ``[B, S]``; the values are not read."""
    if tuple(seq_idx_BS.shape) != (batch, rows) or seq_idx_BS.dtype != torch.int32:
        raise ModelError(
            f"seq_idx is {seq_idx_BS.dtype} {list(seq_idx_BS.shape)}, expected torch.int32 [B, S] = [{batch}, {rows}]: the "
            "number of the document of every row"
        )


def other_documents(seq_idx_BS: torch.Tensor) -> torch.Tensor:
    """Return the mask, True = masked, of other documents: bool ``[B, 1, S, S]``; not causal by itself."""
    return (seq_idx_BS[:, :, None] != seq_idx_BS[:, None, :])[:, None]


def additive_mask(seq_idx_BS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask ``[B, 1, S, S]``, shared: 0 for earlier rows of a row's document and itself, −∞ elsewhere."""

    def make() -> torch.Tensor:
        rows = seq_idx_BS.shape[1]
        hidden = other_documents(seq_idx_BS)
        hidden |= torch.ones(rows, rows, dtype=torch.bool, device=seq_idx_BS.device).triu(1)
        return torch.zeros(hidden.shape, dtype=dtype, device=seq_idx_BS.device).masked_fill_(hidden, float("-inf"))

    return shared(seq_idx_BS, ("additive mask", dtype), make)


def cu_seqlens_of(seq_idx_BS: torch.Tensor, max_documents: int) -> torch.Tensor:
    """Return the documents' first rows, with batch rows concatenated, as int32 ``[max_documents + 1]``; shared.

    After the last document, its end, B · S, is repeated. The longest document is assumed to have S rows.

    Raises:
        ModelError: on a CPU, there are more documents; on a GPU they abort the process.
    """
    advice = "join short documents in the data, or raise max_documents in the file of MEGACPP_CONFIG"

    def make() -> torch.Tensor:
        batch, rows = seq_idx_BS.shape
        starts_BS = document_starts(seq_idx_BS, batch=batch, rows=rows)
        starts_BS[:, 0] = True
        ordinals = starts_BS.flatten().cumsum(0, dtype=torch.int32) - 1
        _require(
            ordinals[-1] < max_documents,
            f"at most {max_documents} documents in {batch} rows of {rows}: {advice}",
            lambda: f"{int(ordinals[-1]) + 1} documents in {batch} rows of {rows}; expected at most {max_documents}: {advice}",
        )
        wanted = torch.arange(max_documents + 1, dtype=torch.int32, device=seq_idx_BS.device)
        return torch.searchsorted(ordinals, wanted, out_int32=True)

    return shared(seq_idx_BS, ("cu_seqlens", max_documents), make)


def roll_left(
    tensor: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rolled: torch.Tensor | None = None,
    *,
    ranks: int = 1,
    rank: int = 0,
) -> torch.Tensor:
    """Shift every sequence on the last axis left by one; its last entry becomes 0, padding is unchanged.

    Args:
        tensor: ``[..., S]``, or with several ``ranks`` the chunks ``rank`` and ``2 * ranks - 1 - rank`` of ``2 * ranks``.
        cu_seqlens: of the S rows; sequences may be empty.
        rolled: ``tensor`` with the full row shifted; optional on a single rank.
    """
    rows = tensor.shape[-1] * ranks
    ends = torch.zeros(rows + 1, dtype=torch.bool, device=tensor.device).index_fill_(0, cu_seqlens[1:].long(), True)
    is_last, places = ends[1:], torch.arange(rows, device=tensor.device)
    if ranks > 1:
        chunks = zip(is_last.chunk(2 * ranks), places.chunk(2 * ranks), strict=True)
        first, *_, last = list(chunks)[rank : 2 * ranks - rank]
        is_last, places = (torch.cat(pair) for pair in zip(first, last, strict=True))
    rolled = tensor.roll(-1, -1) if rolled is None else rolled
    return torch.where(places < cu_seqlens[-1], rolled.masked_fill(is_last, 0), tensor)


def segmented_cumsum(values: torch.Tensor, starts_BS: torch.Tensor) -> torch.Tensor:
    """Compute the cumulative sum over axis 1 of ``[B, S, …]``, restarting from 0 at every start.

    By doubling, log₂ S additions: no document's values are ever added to another's sum and subtracted later.
    """
    seq_idx_BS = starts_BS.cumsum(1, dtype=torch.int32)
    step, rows = 1, values.shape[1]
    while step < rows:
        together_BS = seq_idx_BS[:, step:] == seq_idx_BS[:, :-step]
        together = together_BS.reshape(*together_BS.shape, *(1,) * (values.dim() - 2))
        added = values[:, step:] + torch.where(together, values[:, :-step], torch.zeros_like(values[:, step:]))
        values = torch.cat((values[:, :step], added), dim=1)
        step *= 2
    return values
