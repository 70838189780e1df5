"""RMSNorm at the head of a residual branch, and the residual around it (imports no torch)."""
