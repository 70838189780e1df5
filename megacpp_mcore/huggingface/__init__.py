"""NAM56R outside of Megatron: a checkpoint exported as safetensors with plain-PyTorch code for transformers, and read back."""
