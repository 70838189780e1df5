"""Stock command lines: a model as Megatron's arguments and back, and the forms a command is printed in. Pure Python."""
