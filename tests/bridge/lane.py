"""Megatron-Bridge on the CPU lane, as a run has it."""

import contextlib
from collections.abc import Iterator

from megacpp_mcore.launch import process
from megacpp_mcore.nemo_recipes import bridge
from megacpp_mcore.util.stand_in import process_environment


@contextlib.contextmanager
def with_bridge() -> Iterator[None]:
    """Import Bridge on the CPU lane, which lasts as long as the context."""
    with process_environment(), process.cpu_lane():
        bridge.prepare()
        yield
