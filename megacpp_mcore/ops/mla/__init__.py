"""MLA core attention: softmax attention with different query-key and value widths (imports no torch)."""
