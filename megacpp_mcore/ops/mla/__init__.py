"""MLA core attention: softmax attention whose query-key and value widths differ (imports no torch)."""
