"""Stock command lines: a model as Megatron's arguments and back, and the output formats of a command. Pure Python."""
