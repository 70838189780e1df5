"""The bridge to Transformer Engine, an optional backend."""
