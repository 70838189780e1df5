"""Receipts of runs: written during the run, assembled from what its ranks recorded, judged, compared. No torch at import."""

from megacpp_mcore.observe.receipts.assemble import read
from megacpp_mcore.observe.receipts.writer import ReceiptWriter

__all__ = ["ReceiptWriter", "read"]
