"""What hears of a training run as it happens. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacpp_mcore.observe.steps import Step


class Superseded(Exception):
    """Another process records in the run's folder: nobody of this one may write there any more."""


class Listener:
    """Hears of a run on every rank. Each method does nothing until it is overridden.

    A listener must not synchronise with the GPU outside of :meth:`on_step`, and there only where it says so: what it costs is
    part of the step. It must never wait for other ranks: one that raises an error hears of nothing more but the end, on its
    rank alone, and training goes on. What it has Megatron call besides, as a hook, must raise none.
    """

    def on_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """The model's chunks and its optimizer are there, a checkpoint loaded."""

    def on_step_begin(self, number: int) -> None:
        """Step ``number`` (1-based) begins."""

    def on_step(self, step: Step) -> None:
        """``step`` has ended and was logged; its losses are only known on the last pipeline stage."""

    def on_failure(self, failed: Listener, error: Exception, step: int) -> None:
        """``failed``, perhaps this one, has raised ``error`` in step ``step``, before the first (0), or at the end."""

    def on_end(self, error: BaseException | None) -> None:
        """Training has ended, or ``error`` ended it."""

    def on_over(self) -> None:
        """Everybody was told of the end."""
