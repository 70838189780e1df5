"""The folder of ``--save`` and ``--load``: which run saves in it, what its tracker file names, and which checkpoint is whole.

:func:`claim` and :func:`choose` are collective: every rank calls them, and an error on one rank is raised on all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megacpp_mcore.checkpoints.integrity import COMMON, CONFIG, MANIFEST, METADATA, Unreadable, damages, torch_files
from megacpp_mcore.checkpoints.layout import RESAVE
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.util.collectives import gathered, rank_and_size, say
from megacpp_mcore.util.files import is_remote

TRACKER = "latest_checkpointed_iteration.txt"
LOCK = "training.lock"
VISIBLE_S = 60.0
"""Time within which a file written on one host is visible on all hosts that share its folder."""
RELEASE = "release"
"""Content of the tracker file, instead of a number, for a checkpoint without optimizer state."""

load_newest_whole = False
"""Whether the newest whole checkpoint replaces a damaged one; set by the spec, from the file of ``MEGACPP_CONFIG``."""

_lock_file: IO[str] | None = None
"""Locked on rank 0 while the run lasts."""
_claimed: str | None = None
"""The folder that this process's run saves in."""


def read_tracker(folder: Path) -> str | None:
    """Read what the tracker file in ``folder`` names: a number's digits or :data:`RELEASE`; None without a file.

    Raises:
        CheckpointError: the file cannot be read or contains something else, or it or the folder is a dangling link.
    """
    tracker = folder / TRACKER
    _refuse_dangling(folder)
    _refuse_dangling(tracker)
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tracker} cannot be read: {error}") from error
    if not re.fullmatch(f"[0-9]{{1,12}}|{RELEASE}", text):
        raise CheckpointError(f"{tracker} contains {text[:40]!r}, expected the number of an iteration or {RELEASE!r}")
    return text


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} is a link to {os.readlink(path)}, which does not exist; correct or remove it")


def iteration_folder(folder: Path, name: str) -> Path:
    """Return the folder of the checkpoint that a tracker file calls ``name``."""
    return folder / (name if name == RELEASE else f"iter_{int(name):07d}")


def newest_iteration(folder: Path) -> Path:
    """Return the folder of a whole checkpoint of one iteration: ``folder``, or that of the latest one in it; not collective.

    Raises:
        CheckpointError: it is not a checkpoint in the format torch_dist, or is damaged.
    """
    newest = folder
    if not (folder / METADATA).is_file():
        named = read_tracker(folder)
        if named is None:
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no {METADATA} and no {TRACKER}; name the folder of --save, or one "
                "iter_… in it"
            )
        newest = iteration_folder(folder, named)
        if any(newest.glob("mp_rank_*")):
            raise CheckpointError(f"{newest} is in the format torch, which is sharded like its run; {RESAVE}")
    newest = newest.absolute()
    if damaged := damages(newest):
        raise CheckpointError(f"{newest} is damaged: {'; '.join(damaged)}; restore it from a copy, or name another iteration")
    return newest


def claim(save: str, load: str | None, step: int | None, *, finetune: bool, timeout_minutes: float = 10.0) -> None:
    """Make this the only run that saves in ``save``, until :func:`release` or the end of rank 0's process.

    Args:
        save, load: as in ``--save`` and ``--load``.
        step: ``--ckpt-step``, if it was passed.
        finetune: whether the run counts iterations from 0 whatever it loads.
        timeout_minutes: of collectives; at most half of it is spent waiting for a file of rank 0 to appear.

    Raises:
        CheckpointError: another process saves there; the folder has a checkpoint later than where the run starts, and the run
            does not continue from it; the folder cannot be written; a tracker file is damaged.
    """
    global _claimed
    if _claimed == save or is_remote(save):
        return
    release()
    marker = _on_rank_0(lambda: _lock(Path(save)))
    try:
        visible = gathered(_sees(marker, min(VISIBLE_S, 30 * timeout_minutes)))
    finally:
        if _lock_file is not None:
            _remove(marker)
    if blind := [str(rank) for rank, is_visible in enumerate(visible) if not is_visible]:
        release()
        raise CheckpointError(
            f"--save {save} on the host of rank 0 is another folder than on that of rank {', '.join(blind)}; all ranks write "
            "parts of one checkpoint: name a folder that all hosts share",
            code="not-shared",
        )
    if not is_remote(load):
        start = None if finetune or not load else Path(load)
        if _on_rank_0(lambda: _refuse_to_overwrite(Path(save), start, step)) and start and load_newest_whole:
            step = choose(start, step)  # an earlier one, if that is damaged
            _on_rank_0(lambda: _refuse_to_overwrite(Path(save), start, step))
    _claimed = save


def release() -> None:
    """Let other runs save in the folder of :func:`claim`."""
    global _claimed, _lock_file
    if _lock_file is not None:
        _lock_file.close()
    _claimed = _lock_file = None


def _sees(path: Path, within_s: float) -> bool:
    """Wait up to ``within_s`` for ``path`` to exist; return whether it does. A network client may cache that it did not."""
    until = time.monotonic() + within_s
    while not os.path.exists(path):  # which raises nothing: the others wait
        if time.monotonic() > until:
            return False
        time.sleep(0.5)
    return True


def _remove(path: Path) -> None:
    """Remove a harmless file; an error on rank 0 would leave the other ranks waiting."""
    with contextlib.suppress(OSError):
        path.unlink()


def _lock(save: Path) -> Path:
    """Lock ``save`` and return a new, closed file in it: object stores show no open file to other hosts."""
    global _lock_file
    _refuse_dangling(save)
    try:
        save.mkdir(parents=True, exist_ok=True)
        stream = open(save / LOCK, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 (open while the run lasts)
    except OSError as error:
        raise CheckpointError(f"--save {save} cannot be written ({error}); name another folder") from error
    try:
        # Not flock(), whose lock would outlive a killed process in the children that it has forked.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        stream.seek(0)
        holder = stream.read().strip() or "another process"
        stream.close()
        raise CheckpointError(
            f"{holder} is training and saves in {save}; wait until it ends, or name another --save folder"
        ) from error
    except OSError as error:
        say(f"{save} is on a file system without locks ({error}): nothing prevents a second run from saving there")
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    _lock_file, marker = stream, save / f"{LOCK}.{os.urandom(8).hex()}"
    try:
        stream.truncate(0)
        stream.write(holder)
        stream.flush()
        os.fsync(stream.fileno())
        for leftover in save.glob(f"{LOCK}.*"):  # from a start that was killed
            _remove(leftover)
        marker.write_text(holder, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"--save {save} cannot be written ({error}); make room, or name another folder") from error
    return marker


def _refuse_to_overwrite(save: Path, load: Path | None, step: int | None) -> bool:
    """Refuse a run that starts from ``load`` and would replace later checkpoints; return whether an earlier start would."""
    numbers = _iterations(save)[1]
    if load is not None and os.path.realpath(load) == os.path.realpath(save):
        if step and numbers and step < numbers[0]:  # choose() reports one that a tracker file leaves behind
            say(f"{save} has a checkpoint of iteration {numbers[0]}: this run, from --ckpt-step {step}, replaces it")
        return False
    tracker = read_tracker(save)
    newest = max([*numbers, 0 if tracker in (None, RELEASE) else int(tracker)])
    named = None if load is None else str(step) if step else read_tracker(load)
    start = 0 if named in (None, RELEASE) else int(named)
    if start < newest:
        raise CheckpointError(
            f"{save} has a checkpoint of iteration {newest}, and this run, which starts at iteration {start}, would replace "
            f"it without having loaded it; to continue from it, add --load {save} (without --finetune); otherwise name another "
            "--save folder"
        )
    return newest > 0


def _iterations(folder: Path) -> tuple[list[Path], list[int]]:
    """Return the folders of iterations in ``folder``, and the numbers of those that a save has completed, latest first."""
    # Megatron takes --ckpt-step 0 as unset: a checkpoint of iteration 0 is loaded only through the tracker file.
    folders = [path for path in folder.glob("iter_*[1-9]*") if path.name[5:].isdecimal()]
    complete = [path for path in folders if torch_files(path) or _is_complete(path)]
    return sorted(folders), sorted((int(path.name[5:]) for path in complete), reverse=True)


def _is_complete(folder: Path) -> bool:
    """Return whether the last file exists: ``metadata.json``, or ``.metadata`` for ``torch_dcp``, which has no common state."""
    metadata = folder / METADATA
    has_common = (folder / "common.pt").exists() or (metadata.exists() and COMMON.encode() in metadata.read_bytes())
    return metadata.exists() and ((folder / CONFIG).exists() or not has_common)


def choose(load: Path, step: int | None, *, by_digests: bool = True) -> int | None:
    """Check the checkpoint of ``--load`` and ``--ckpt-step`` that is about to be loaded; ``by_digests`` as in :func:`damages`.

    Returns the iteration to load, as in ``--ckpt-step``; None for what the tracker file names.

    Raises:
        CheckpointError: the checkpoint or the tracker file is damaged; the message names the file and what is whole.
    """
    named, problem, numbers, is_lost, is_first = _on_rank_0(lambda: _look(load, step))
    later: list[int] = []
    if named is not None:
        folder = iteration_folder(load, named)
        if damaged := _damages(folder, by_digests):
            problem = _problem(folder, damaged)
            later = [number for number in numbers if named != RELEASE and number > int(named)]
            numbers = [number for number in numbers if named == RELEASE or number < int(named)]
        elif not (folder / MANIFEST).exists() and not torch_files(folder):
            say(f"{folder} has no {MANIFEST}: its files are not checked for flipped bits")
    if problem is None:
        return step
    newest = None
    for number in (*numbers, *later):  # the later ones are only named: the user may have gone back on purpose
        if not (damaged := _damages(folder := iteration_folder(load, str(number)), by_digests)):
            newest = number
            break
        problem += f"; {folder}: {', '.join(damaged)}"
    if newest in numbers and (load_newest_whole or is_lost):
        if named is not None:  # a run that saves here will come to it
            _on_rank_0(lambda: _refuse_dangling(iteration_folder(load, named)))
        say(f"{problem}; loading the newest whole checkpoint, {iteration_folder(load, str(newest))}")
        return newest
    if is_first:
        say(f"{problem}; its first save was not completed: starting from scratch")
        return None
    if newest is None:
        restart_hint = "; to start from scratch, remove all of them" if is_lost else ""
        raise CheckpointError(
            f"{problem}; no whole checkpoint exists: restore the file from a copy{restart_hint}", code="none-whole"
        )
    after = () if newest in later else later
    if whole := next((number for number in after if not _damages(iteration_folder(load, str(number)), by_digests)), None):
        raise CheckpointError(
            f"{problem}; the newest whole checkpoint before it is {iteration_folder(load, str(newest))}, and "
            f"{iteration_folder(load, str(whole))} is whole, too: to continue from one of them, write {newest} or {whole} to "
            f"{load / TRACKER}",
            code="damaged",
        )
    setting_hint = ", or set checkpoints: {load_newest_whole: true} in the file of MEGACPP_CONFIG"
    raise CheckpointError(
        f"{problem}; the newest whole checkpoint is {iteration_folder(load, str(newest))}: to continue from it, write {newest} "
        f"to {load / TRACKER}{'' if newest in later else setting_hint}",
        code="damaged",
    )


def choose_non_persistent(folder: Path | None, iteration: int, load: Path | None, step: int | None, **how: bool) -> bool:
    """Return whether the non-persistent checkpoint of ``iteration`` (-1: none) is loaded, and check it if so.

    ``folder`` is where it is, None if it is not to be checked; other arguments are as in :func:`choose`.

    Raises:
        CheckpointError: it is damaged, or the tracker file in ``load`` is.
    """
    if iteration == -1:
        return False
    named = str(step) if step else _on_rank_0(lambda: None if load is None else read_tracker(load))
    if iteration < (-1 if named is None else 0 if named == RELEASE else int(named)):
        return False
    if folder is None or not (damaged := _damages(checkpoint := iteration_folder(folder, str(iteration)), **how)):
        return True
    problem = _problem(checkpoint, damaged)
    if named is None or not load_newest_whole:
        raise CheckpointError(
            f"{problem}; to load the persistent checkpoint, if there is one, remove {folder}, or set checkpoints: "
            "{load_newest_whole: true} in the file of MEGACPP_CONFIG",
            code="damaged",
        )
    say(f"{problem}; loading from {load}")
    return False


def _problem(folder: Path, damages: list[str]) -> str:
    """Describe the damage to the checkpoint in ``folder``; raise if this user may not read it, which is not damage."""
    if denied := [damage for damage in damages if isinstance(damage, Unreadable)]:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be read: {'; '.join(denied)}; expected files that this user may read: change "
            "their permissions, or name a copy",
            code="denied",
        )
    return f"the checkpoint {folder} is damaged: {'; '.join(damages)}"


def _look(load: Path, step: int | None) -> tuple[str | None, str | None, list[int], bool, bool]:
    """Read on rank 0 what a folder holds.

    Returns:
        The checkpoint to load, as in a tracker file; why none is named; the iterations of all complete distributed
        checkpoints, latest first; whether they lack a tracker file; and whether the folder may hold only the remains of
        a run that was killed in its first save.
    """
    dirs, numbers = _iterations(load)
    if step:
        if not (folder := iteration_folder(load, str(step))).exists() and not folder.is_symlink():
            available = ", ".join(map(str, sorted(numbers or [int(path.name[5:]) for path in dirs]))) or "none"
            raise CheckpointError(
                f"--ckpt-step {step}: {folder} does not exist; the iterations in {load} are {available}: name one"
            )
        return str(step), None, numbers, False, False
    try:
        named = read_tracker(load)
    except CheckpointError as error:
        return None, str(error), numbers, False, False
    if named is None:
        partial = [f"; {path}: lacks {METADATA} or {CONFIG}" for path in dirs if int(path.name[5:]) not in numbers]
        problem = f"{load} has checkpoints, but no {TRACKER}{''.join(partial)}" if dirs else None
        return None, problem, numbers, True, len(dirs) == 1 and not (dirs[0] / MANIFEST).exists()
    if numbers and named != RELEASE and int(named) < numbers[0]:
        say(
            f"{load / TRACKER} names iteration {named}, and {numbers[0]} is there, too: a run that saves here replaces "
            f"it; to continue from it, write {numbers[0]} to the file"
        )
    return named, None, numbers, False, False


def _damages(folder: Path, by_digests: bool = True) -> list[str]:
    """As :func:`damages`, with the files split over all ranks."""
    shares = gathered(damages(folder, *rank_and_size(), by_digests=by_digests))
    return list(dict.fromkeys(damage for share in shares for damage in share))


def _on_rank_0[T](compute: Callable[[], T]) -> T:
    """Return the result of ``compute()`` on rank 0 to every rank; its error is a CheckpointError on every rank."""
    outcome: tuple[Any, str | None] = (None, None)
    if rank_and_size()[0] == 0:
        try:
            outcome = compute(), None
        except Exception as error:  # the others wait
            advice = ": expected a file or folder that this user may read" if isinstance(error, PermissionError) else ""
            outcome = None, f"{error}{advice}" if isinstance(error, CheckpointError | OSError) else repr(error)
    result: T
    result, problem = gathered(outcome)[0]
    if problem is not None:
        raise CheckpointError(problem)
    return result
