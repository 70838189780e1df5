"""Bits per byte: a baseline to beat, and a model's running score.

What is counted. The text's bytes are the unit: a dataset's end-of-document tokens are not bytes. A byte model predicts a
stream ``bytes of document 1, eod, bytes of document 2, eod, …``. Its loss covers the end-of-document tokens, which say
where a document ends; their nats are charged to the bytes, but they do not add to the number of bytes. So the ends never
flatter a model's bits per byte, while the unigram score leaves them out altogether, which makes it easier to reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megacpp_mcore.data.index import read_index
from megacpp_mcore.data.manifest import load_manifest
from megacpp_mcore.data.tokenizer import BYTE_COUNT, ByteTokenizer
from megacpp_mcore.errors import DataError

_TOKENS_AT_ONCE = 1 << 22


def unigram_bits_per_byte(prefix: str) -> float:
    """Return the empirical unigram entropy of the bytes of a byte dataset, in bits per byte.

    That is ``-Σ_b p_b log2 p_b`` with ``p_b`` the share of byte ``b`` among *these* bytes: the minimum for a model
    without context, because it is fitted to the bytes it is scored on. Specials are not counted.

    Raises:
        DataError: the dataset is damaged, was not made with the byte tokenizer, or holds no bytes.
    """
    tokenizer = load_manifest(prefix).tokenizer
    if tokenizer["checksum"] != ByteTokenizer().checksum():
        raise DataError(
            f"{prefix} was made with the tokenizer {tokenizer['kind']}; expected the byte tokenizer, whose ids are "
            "bytes: prepare the text with --tokenizer byte to score it"
        )
    counts = np.zeros(BYTE_COUNT, dtype=np.int64)
    tokens_N = read_index(prefix).open_tokens()
    for start in range(0, len(tokens_N), _TOKENS_AT_ONCE):
        counts += byte_counts(tokens_N[start : start + _TOKENS_AT_ONCE])
    if not counts.any():
        raise DataError(f"{prefix}.bin holds no bytes, only specials; expected text")
    return entropy(counts)


def byte_counts(ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Count how often each byte is among the ids of a byte dataset; specials are left out."""
    return np.bincount(ids[ids < BYTE_COUNT], minlength=BYTE_COUNT)


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Compute the entropy, in bits, of the distribution given by ``counts`` (which sum to at least one)."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum()) + 0.0  # -0.0 for a single symbol


@dataclass
class BitsPerByte:
    """A running score: nats summed over predicted tokens, and the text bytes of those tokens.

    Count bytes only for tokens with a loss in ``nats``: the first token of a sequence is context,
    not a prediction. For a byte model the bytes are the sum of :func:`byte_counts` of the labels with loss mask 1.
    """

    nats: float = 0.0
    bytes: int = 0

    def add(self, nats: float, bytes_: int) -> None:
        """Count a batch: the sum (not the mean) of its token losses in nats, and its bytes.

        Raises:
            DataError: a loss that is negative or not a number, or a negative count.
        """
        if not 0 <= nats < math.inf or bytes_ < 0:
            raise DataError(f"found {nats} nats over {bytes_} bytes; expected a finite sum of losses, and a count")
        self.nats += nats
        self.bytes += bytes_

    @property
    def value(self) -> float:
        """Bits per byte so far.

        Raises:
            DataError: no byte has been counted.
        """
        if not self.bytes:
            raise DataError("no bytes were counted; expected text after the first token: score more of it", code="no-bytes")
        return self.nats / (math.log(2) * self.bytes)
