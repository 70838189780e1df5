"""Receipts of runs: written as a run goes, assembled from what its ranks left, judged, and compared. No torch at import."""

from megacpp_mcore.observe.receipts.assembly import assemble, part_file
from megacpp_mcore.observe.receipts.folder import read, write
from megacpp_mcore.observe.receipts.writer import ReceiptWriter

__all__ = ["ReceiptWriter", "assemble", "part_file", "read", "write"]
