"""The one seam to a training loop: what the loop does is told to listeners while it happens; nothing else changes.

:func:`observing` wraps the functions of ``megatron.training.training`` that the loop looks up by name, hands on what they are
given and return, and puts them back. Written against megatron-core 0.19.2 and Megatron-LM core_v0.19.0; a function that is not
there any more is an error before training starts. :class:`Loop` is what others have to know of the loop that trains;
:mod:`megacpp_mcore.observe.loop_bridge` is that of Megatron-Bridge.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from megacpp_mcore import lowering
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.listener import Listener, Superseded
from megacpp_mcore.observe.steps import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """One function of the loop.

    Attributes:
        module: where the loop looks it up.
        name: its name there, dotted for a method.
        phase: what the process is in while it runs, or None.
        within: the phases in which that holds; anywhere if empty.
    """

    module: str
    name: str
    phase: Phase | None = None
    within: frozenset[Phase] = frozenset()


_TRAINING = "megatron.training.training"
STOCK = (
    Seam(_TRAINING, "setup_model_and_optimizer"),
    Seam(_TRAINING, "load_checkpoint", Phase.LOAD),
    Seam(_TRAINING, "train"),
    Seam(_TRAINING, "train_step", Phase.STEP),
    Seam(_TRAINING, "training_log"),
    Seam(_TRAINING, "save_checkpoint", Phase.SAVE),
    Seam(_TRAINING, "save_checkpoint_and_time", Phase.SAVE),
    Seam(_TRAINING, "maybe_finalize_async_save", Phase.SAVE),
    Seam(_TRAINING, "evaluate_and_print_results", Phase.EVALUATION),
    Seam("megatron.core.rerun_state_machine", "RerunDataIterator.__next__", Phase.DATA, frozenset({Phase.STEP})),
)
"""The functions of Megatron's own loop."""


class Loop(ABC):
    """A loop that trains, as those see it who record a run."""

    printing: ClassVar[tuple[str, str]]
    """Module and name of the function by which the loop prints the line of an iteration."""

    @abstractmethod
    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """Run the clock's phases by what the loop does in this process, and tell ``listeners``, until the context ends.

        Raises:
            LaunchError: the loop has not the functions that it has to have; nothing has been replaced.
        """

    @abstractmethod
    def arguments(self) -> Any:
        """What the run was told, by the names of stock Megatron's arguments; known once there is a model."""

    @abstractmethod
    def describe_model(self, host: str) -> tuple[object, ...]:
        """What :func:`megacpp_mcore.lowering.matching_preset` knows the run's model by, built on ``host``."""

    @abstractmethod
    def writers(self) -> tuple[Any, Any]:
        """TensorBoard's writer and W&B's run in this process, each None where there is none."""


class StockLoop(Loop):
    """Megatron's own."""

    printing = (_TRAINING, "print_rank_last")

    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """See :func:`observing`."""
        return observing(clock, listeners)

    def arguments(self) -> Any:
        """As Megatron has read them."""
        from megatron.training import get_args

        return get_args()

    def describe_model(self, host: str) -> tuple[object, ...]:
        """The configuration that Megatron makes of its arguments."""
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

        described = (gpt_config_from_args if host == lowering.GPT else hybrid_config_from_args)(self.arguments())
        return (described.transformer, described)

    def writers(self) -> tuple[Any, Any]:
        """Megatron's global ones."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()


@contextlib.contextmanager
def observing(clock: Clock, listeners: Sequence[Listener]) -> Iterator[None]:
    """Run the clock's phases by what stock Megatron does in this process, and tell ``listeners``, until the context ends.

    Raises:
        LaunchError: Megatron has no function of one of the names; nothing has been replaced.
    """
    told = _ToldByStock(clock, listeners)
    special = {
        "setup_model_and_optimizer": told.model,
        "train": told.loop,
        "train_step": told.step,
        "training_log": told.logged,
        "maybe_finalize_async_save": told.finalized,
    }
    with replaced(STOCK, told, special):
        yield


@contextlib.contextmanager
def replaced(seams: Sequence[Seam], told: Told, special: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Put functions that tell in the place of those of ``seams``, and those back when the context ends, which is told, too.

    Args:
        seams: what is replaced.
        told: whom it is told to.
        special: what makes the replacement, by name; of the other seams, only the time is taken.

    Raises:
        LaunchError: a function is not there; nothing has been replaced.
    """
    with contextlib.ExitStack() as stack:
        stack.push(told.end)  # first, so that a missing function is told, too
        places = [(seam, *_resolve(seam)) for seam in seams]
        for seam, holder, name, stock in places:
            setattr(holder, name, special[seam.name](stock) if seam.name in special else told.timed(stock, seam))
            stack.callback(setattr, holder, name, stock)
        yield


def _resolve(seam: Seam) -> tuple[Any, str, Callable[..., Any]]:
    """The object that holds a seam's function, the function's name in it, and the function."""
    __import__(seam.module)
    holder: Any = sys.modules[seam.module]
    *path, name = seam.name.split(".")
    try:
        for part in path:
            holder = vars(holder)[part]
        return holder, name, vars(holder)[name]
    except KeyError as error:
        raise LaunchError(
            f"this Megatron's {seam.module} has no {seam.name}, by which a run is observed; use megatron-core 0.19 (and "
            "megatron-bridge 0.6), or switch it off with --no-observe"
        ) from error


class Told:
    """Tells what happens in a loop; the loop's own stand-ins call it."""

    def __init__(self, clock: Clock, listeners: Sequence[Listener]) -> None:
        self.clock = clock
        self._listeners = tuple(listeners)
        self._hearing = list(listeners)
        self._step = 0
        self._resumed_at: int | None = None

    def timed(self, stock: Callable[..., Any], seam: Seam) -> Callable[..., Any]:
        """``stock`` in the seam's phase."""
        clock, phase, within = self.clock, seam.phase, seam.within

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            if phase is None or (within and clock.phase not in within):
                return stock(*args, **kwargs)
            clock.enter(phase)
            try:
                return stock(*args, **kwargs)
            finally:
                clock.leave(phase)

        return run

    def tell_model(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """The model stands, a checkpoint is loaded."""
        self.tell(lambda listener: listener.on_model(chunks, optimizer))

    def tell_begin(self, number: int) -> None:
        """Step ``number`` begins."""
        self._step = number
        self.tell(lambda listener: listener.on_step_begin(number))

    def tell_step(self, given: Mapping[str, Any], scalars: Mapping[str, float], number: int, tokens: int) -> None:
        """A step was logged.

        Args:
            given: the arguments of ``training_log``, by name.
            scalars: what it gave to a writer; of these, the auxiliary losses that it computes itself are wanted.
            number: of the step, 1-based.
            tokens: trained on since step 0.
        """
        try:
            step = self._step_of(given, scalars, number, tokens)
        except Exception:
            logger.exception("step %d is not recorded; training is not affected", number)
            return
        self.tell(lambda listener: listener.on_step(step))

    def _step_of(self, given: Mapping[str, Any], scalars: Mapping[str, float], number: int, tokens: int) -> Step:
        if self._resumed_at is None:
            self._resumed_at = number - 1
        losses = {name: float(value) for name, value in given["loss_dict"].items()}
        losses |= {name: value for name, value in scalars.items() if name.endswith("loss") and name not in losses}
        grad_norm, learning_rate = given["grad_norm"], given["learning_rate"]
        return Step(
            step=number,
            resumed_at=self._resumed_at,
            time_s=time.time(),
            tokens=tokens,
            losses=losses,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=None if learning_rate is None else float(learning_rate),
            skipped=bool(given["skipped_iter"]),
        )

    def tell(self, tell: Callable[[Listener], None]) -> None:
        """Tell those who have not failed; one that does hears of nothing more but the end: recording must not end training."""
        for listener in tuple(self._hearing):
            try:
                tell(listener)
            except Superseded as error:
                self._give_way(error)
                return
            except Exception as error:
                logger.exception(
                    "%s failed in step %d and records nothing more; training is not affected",
                    type(listener).__name__,
                    self._step,
                )
                self._hearing.remove(listener)
                self._tell_failure(listener, error)

    def _give_way(self, error: Superseded) -> None:
        """Tell nobody anything more, the end included: what they would write to is another process's now."""
        logger.error("%s; this process records nothing more, and training goes on", error)
        for one in self._listeners:  # each lets go of what it has, as if it had failed itself
            try:
                one.on_failure(one, error, self._step)
            except Exception:
                logger.exception("%s could not let go of what it records", type(one).__name__)
        self._listeners, self._hearing = (), []

    def _tell_failure(self, failed: Listener, error: Exception) -> None:
        for listener in self._listeners:
            try:
                listener.on_failure(failed, error, self._step)
            except Exception:
                logger.exception("%s could not take in that %s failed", type(listener).__name__, type(failed).__name__)

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Tell the end, everyone, whatever happens to one; a status that a script exits with is no error."""
        quiet = isinstance(error, SystemExit) and not error.code
        for listener in self._listeners:
            try:
                listener.on_end(None if quiet else error)
            except Superseded as superseded:
                self._give_way(superseded)
                return
            except Exception as failure:
                logger.exception("%s could not end what it records; training is not affected", type(listener).__name__)
                self._tell_failure(listener, failure)
        for listener in self._listeners:
            try:
                listener.on_over()
            except Exception:
                logger.exception("%s could not let go of what it recorded", type(listener).__name__)


class _ToldByStock(Told):
    """The functions that stand in for Megatron's."""

    def model(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``setup_model_and_optimizer``, which returns the model's chunks and the optimizer first."""

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            made = stock(*args, **kwargs)
            self.tell_model(made[0], made[1])
            return made

        return run

    def loop(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``train``: start-up is over."""

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.clock.become(Phase.IDLE)
            return stock(*args, **kwargs)

        return run

    def step(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``train_step``, whose number is one more than that of the iterations that are done."""
        from megatron.training import get_args

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.tell_begin(get_args().curr_iteration + 1)
            with self.clock.within(Phase.STEP):
                return stock(*args, **kwargs)

        return run

    def finalized(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``maybe_finalize_async_save``, called every step, which is part of a save only with ``--async-save``."""
        from megatron.training import get_args

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.clock.within(Phase.SAVE) if get_args().async_save else contextlib.nullcontext():
                return stock(*args, **kwargs)

        return run

    def logged(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """``training_log``, with the writer it asks for; both are handed on unchanged."""
        from megatron.training import get_args, training

        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            stock_writer = training.get_tensorboard_writer
            collector = Collector(stock_writer())
            training.get_tensorboard_writer = lambda: collector
            try:
                result = stock(*args, **kwargs)
            finally:
                training.get_tensorboard_writer = stock_writer
            said = get_args()
            self.tell_step(given, collector.scalars, given["iteration"], said.consumed_train_samples * said.seq_length)
            return result

        return run


class Collector:
    """Stands where a TensorBoard writer is asked for, keeps the scalars, and hands everything on to that writer, if any."""

    def __init__(self, stock: Any = None) -> None:
        self.scalars: dict[str, float] = {}
        self.stock = stock

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the writer: Megatron writes its timers only to what is an instance of TensorBoard's (``Timers.write``)."""
        return Collector if self.stock is None else type(self.stock)

    def add_scalar(self, tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
        """Keep one named value."""
        with contextlib.suppress(TypeError, ValueError):  # no number: the writer may know what it is
            self.scalars[tag] = float(scalar_value)
        if self.stock is not None:
            self.stock.add_scalar(tag, scalar_value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)
