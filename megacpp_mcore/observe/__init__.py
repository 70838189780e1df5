"""What a run leaves behind for people and machines: receipts, counts and reports."""
