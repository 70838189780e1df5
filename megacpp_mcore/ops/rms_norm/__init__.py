"""RMSNorm at the head of a residual branch, and the residual that goes around it (no torch)."""
