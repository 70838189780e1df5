"""Receipts of runs: written as a run goes, assembled from what its ranks left, judged, and compared. No torch at import."""

from megacpp_mcore.observe.receipts.assemble import read
from megacpp_mcore.observe.receipts.writer import ReceiptWriter

__all__ = ["ReceiptWriter", "read"]
