"""A folder of checkpoints: every damage is named, the newest whole checkpoint is found, and one run at a time saves there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.checkpoints import integrity
from megacpp_mcore.checkpoints.folder import LOCK, TRACKER, choose, claim, newest_iteration, read_tracker
from megacpp_mcore.checkpoints.integrity import damages, digested, write_manifest
from megacpp_mcore.errors import CheckpointError
from tests.errors import raises
from tests.saved import Code, flip, write

NEWEST, OLDER = "iter_0000006", "iter_0000003"
SHARD, OTHER = "__0_0.distcp", "__0_1.distcp"
ABOUT_EACH_OTHER = {"metadata.json", "integrity.json"}
FILES = (".metadata", SHARD, OTHER, "metadata.json", "integrity.json")


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    checkpoint_folder.release()
    checkpoint_folder.load_newest_whole = False


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder of ``--save`` with the checkpoints of iterations 3 and 6, of different values."""
    for iteration in (3, 6):
        made = tmp_path / "saved" / f"iter_{iteration:07d}"
        objects = {"rng_state/shard_0_1": [iteration]}
        write(made, {"weight": torch.full((64,), float(iteration))}, objects, {"iteration": iteration}, shards=2)
        write_manifest(made)
    (tmp_path / "saved" / TRACKER).write_text("6")
    return tmp_path / "saved"


def exchange(path: Path) -> None:
    """Give a file the name of a shard, and the shard its name."""
    content, other = path.read_bytes(), path.with_name(OTHER if path.name == SHARD else SHARD)
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"a bit at {at}": lambda path, at=at: flip(path, at) for at in (0, 7, -1)},  # type: ignore[misc]
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "another's": lambda path: shutil.copyfile(path.parents[1] / OLDER / path.name, path),
    "exchanged": exchange,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_and_the_newest_whole_checkpoint_are_named(saved: Path, name: str, damage: str) -> None:
    path = saved / NEWEST / name
    before = path.read_bytes()
    DAMAGES[damage](path)
    if path.exists() and path.read_bytes() == before:
        pytest.fail(f"{damage} changes nothing in {name}")
    with pytest.raises(CheckpointError) as refused:
        choose(saved, None)
    assert f"the checkpoint {saved / NEWEST} is damaged: " in str(refused.value)
    named = str(refused.value).partition("is damaged: ")[2].partition("; the newest")[0]
    assert name in named
    touched = {name} | ({SHARD, OTHER} if damage == "exchanged" else set())
    touched |= ABOUT_EACH_OTHER if name in ABOUT_EACH_OTHER else set()
    assert not any(other in named for other in set(FILES) - touched)
    assert f"the newest whole checkpoint is {saved / OLDER}" in str(refused.value)


TRACKERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "emptied": (lambda path: path.write_bytes(b""), f"{TRACKER} contains ''"),
    "garbage": (lambda path: path.write_bytes(b"\0\xff\x80"), f"{TRACKER} cannot be read"),
    "negative": (lambda path: path.write_text("-6"), f"{TRACKER} contains '-6'"),
    "words": (lambda path: path.write_text("6 or so"), f"{TRACKER} contains '6 or so'"),
    "huge": (lambda path: path.write_text("6" * 5000), f"{TRACKER} contains '666"),
    "of nothing": (lambda path: path.write_text("60"), "iter_0000060 is damaged"),
    "a link to nothing": (lambda path: (path.unlink(), path.symlink_to("nowhere")), f"{TRACKER} is a link to nowhere"),
}


@pytest.mark.parametrize("damage", TRACKERS)
def test_a_damaged_tracker_file_is_named(saved: Path, damage: str) -> None:
    do, says = TRACKERS[damage]
    do(saved / TRACKER)
    with pytest.raises(CheckpointError) as refused:
        choose(saved, None)
    assert says in str(refused.value)
    assert f"the newest whole checkpoint is {saved / NEWEST}" in str(refused.value)
    checkpoint_folder.load_newest_whole = True
    claim(str(saved), str(saved), None, finetune=False)
    assert choose(saved, None) == 6


def test_a_checkpoint_that_is_a_link_to_nothing_is_named(saved: Path) -> None:
    shutil.rmtree(saved / NEWEST)
    (saved / NEWEST).symlink_to("nowhere")
    with raises(CheckpointError, saved / NEWEST, "nowhere", saved / OLDER, code="damaged"):
        choose(saved, None)
    checkpoint_folder.load_newest_whole = True
    with raises(CheckpointError, saved / NEWEST, "nowhere"):
        choose(saved, None)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_not_damaged(saved: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is another checkpoint taken in its place."""
    opened, denied = io.open, str(saved / NEWEST / name)

    def guarded(file: Any, *args: Any, **how: Any) -> Any:
        if str(file) == denied:
            raise PermissionError(errno.EACCES, "Permission denied", denied)
        return opened(file, *args, **how)

    monkeypatch.setattr("io.open", guarded)
    monkeypatch.setattr("builtins.open", guarded)
    checkpoint_folder.load_newest_whole = True
    with raises(CheckpointError, saved / NEWEST, name, "may read", code="" if name == ".metadata" else "denied"):
        choose(saved, None)


def test_an_iteration_that_is_not_there_is_not_damaged(saved: Path) -> None:
    with raises(CheckpointError, "--ckpt-step 7", saved / "iter_0000007", "3, 6"):
        choose(saved, 7)


@pytest.mark.parametrize(("step", "tracker"), [(3, "6"), (None, "3"), (None, "0")])
def test_a_later_checkpoint_is_named_and_not_taken(saved: Path, step: int | None, tracker: str) -> None:
    """Somebody may have gone back on purpose."""
    flip(saved / OLDER / SHARD, 100)
    (saved / TRACKER).write_text(tracker)
    checkpoint_folder.load_newest_whole = True
    with raises(CheckpointError, f"the newest whole checkpoint is {saved / NEWEST}", code="damaged"):
        choose(saved, step)
    (saved / NEWEST / SHARD).unlink()
    with raises(CheckpointError, "no whole checkpoint exists", code="none-whole"):
        choose(saved, step)


def test_whole_checkpoints_before_and_after_a_lost_one_are_named(saved: Path) -> None:
    """Loading the older one by the setting would give up the later one."""
    (saved / TRACKER).write_text("4")
    named = "iter_0000004", f"before it is {saved / OLDER}", f"{saved / NEWEST} is whole, too"
    with raises(CheckpointError, *named, code="damaged") as refused:
        choose(saved, None)
    assert "load_newest_whole" not in str(refused.value)
    flip(saved / NEWEST / SHARD, 100)
    with raises(CheckpointError, f"the newest whole checkpoint is {saved / OLDER}", "load_newest_whole", code="damaged"):
        choose(saved, None)


def test_a_lost_tracker_file_does_not_begin_anew(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / TRACKER).unlink()
    flip(saved / NEWEST / SHARD, 100)
    assert choose(saved, None) == 3
    damage = f"{saved / NEWEST}: {SHARD}: its content is not what was saved; loading the"
    assert f"has checkpoints, but no {TRACKER}; {damage}" in capsys.readouterr().out
    (saved / OLDER / SHARD).unlink()
    with raises(CheckpointError, TRACKER, f"{saved / NEWEST}: {SHARD}", f"{saved / OLDER}: {SHARD}", code="none-whole"):
        choose(saved, None)
    assert not capsys.readouterr().out
    assert choose(saved / "nothing", None) is None


@pytest.mark.parametrize("lacks", [("integrity.json",), ("integrity.json", "metadata.json"), FILES])
def test_a_first_save_that_was_killed_before_its_manifest_begins_anew(
    saved: Path, lacks: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """One of several, or one with a manifest, was whole: Megatron would train from scratch, and replace it in the end."""
    (saved / TRACKER).unlink()
    for name in lacks:
        (saved / NEWEST / name).unlink()
        (saved / OLDER / name).unlink()
    with raises(CheckpointError, TRACKER, f"{saved / OLDER}:", f"{saved / NEWEST}:", code="none-whole") as refused:
        choose(saved, None)
    assert all(f"; {saved / name}: " in str(refused.value) for name in (OLDER, NEWEST))
    shutil.rmtree(saved / OLDER)
    assert choose(saved, None) is None
    assert "its first save was not completed: starting from scratch" in capsys.readouterr().out
    (saved / NEWEST / "integrity.json").write_text("{}")
    with raises(CheckpointError, TRACKER, f"{saved / NEWEST}:", code="none-whole"):
        choose(saved, None)


def test_what_is_whole_is_left_to_the_tracker_file(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose(saved, None) is None
    assert choose(saved, 3) == 3
    assert not capsys.readouterr().out


def test_a_tracker_file_that_names_an_older_checkpoint_is_followed_and_said(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was written back on purpose, the save of the newer one was killed before it, or it was cut."""
    (saved / TRACKER).write_text("3")
    assert choose(saved, None) is None
    says = f"{saved / TRACKER} names iteration 3, and 6 is there, too: a run that saves here replaces it"
    assert says in capsys.readouterr().out


def test_the_newest_whole_one_is_loaded_where_that_is_set(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_folder.load_newest_whole = True
    flip(saved / NEWEST / SHARD, 100)
    assert choose(saved, None) == 3
    assert f"{SHARD}: its content is not what was saved; loading the newest whole" in capsys.readouterr().out
    (saved / OLDER / "integrity.json").unlink()
    with raises(CheckpointError, f"{saved / NEWEST}", f"{saved / OLDER}:", code="none-whole"):
        choose(saved, None)


def test_checkpoints_without_a_manifest_still_load(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (OLDER, NEWEST):
        (saved / name / "integrity.json").unlink()
        (saved / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert choose(saved, None) is None
    assert f"{saved / NEWEST} has no integrity.json: its files are not checked" in capsys.readouterr().out
    for name, damage in (("metadata.json", "emptied"), (SHARD, "cut"), (SHARD, "deleted"), (".metadata", "a bit at 7")):
        before = (saved / NEWEST / name).read_bytes()
        DAMAGES[damage](saved / NEWEST / name)
        with pytest.raises(CheckpointError, match=f"{name}.*{saved / OLDER}"):
            choose(saved, None)
        (saved / NEWEST / name).write_bytes(before)


@pytest.fixture
def of_torch(tmp_path: Path) -> Path:
    """A folder of ``--save`` with checkpoints of two ranks in the format ``torch``, of iterations 3 and 6."""
    for iteration in (3, 6):
        for rank in range(2):
            file = tmp_path / "saved" / f"iter_{iteration:07d}" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save({"iteration": iteration, "model": {"weight": torch.full((64,), iteration + rank / 2)}}, file)
    (tmp_path / "saved" / TRACKER).write_text("6")
    return tmp_path / "saved"


def test_a_flipped_bit_in_a_file_of_torch_is_named_or_changes_nothing(of_torch: Path) -> None:
    """In a value it is named; in what pads records, or in their dates, it changes nothing."""
    name = "mp_rank_01/model_optim_rng.pt"
    path = of_torch / NEWEST / name
    content = path.read_bytes()
    value = content.index(torch.full((64,), 6.5).numpy().tobytes())
    expected = torch.load(path, weights_only=True)
    harmless = 0
    for at in {*range(0, len(content), 31), *range(value, value + 256, 32)}:
        path.write_bytes(content)
        flip(path, at)
        if (found := damages(of_torch / NEWEST)) and found[0].startswith(f"{name}: "):
            assert damages(of_torch / NEWEST, 0, 2) == []
            assert damages(of_torch / NEWEST, 1, 2) == found
            assert damages(of_torch / NEWEST, 1, 2, by_digests=False) == []  # each rank would read all files
        else:
            assert found == []
            assert not value <= at < value + 256
            torch.testing.assert_close(torch.load(path, weights_only=True), expected, rtol=0, atol=0)
            harmless += 1
    assert 0 < harmless < len(content) // 31


@pytest.mark.parametrize("damage", ["a bit at 0", "cut", "emptied"])
def test_a_damaged_file_of_torch_and_the_newest_whole_checkpoint_are_named(
    of_torch: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(of_torch, None) is None
    assert not capsys.readouterr().out
    DAMAGES[damage](of_torch / NEWEST / "mp_rank_01" / "model_optim_rng.pt")
    with raises(CheckpointError, of_torch / NEWEST, "mp_rank_01/model_optim_rng.pt", of_torch / OLDER, code="damaged"):
        choose(of_torch, None)
    (of_torch / TRACKER).unlink()
    with raises(CheckpointError, "iteration 6", f"--load {of_torch}"):
        claim(str(of_torch), None, None, finetune=False)
    assert choose(of_torch, None) == 3


@pytest.fixture
def of_dcp(tmp_path: Path) -> Path:
    """A folder of ``--save`` with checkpoints in the format ``torch_dcp``, of iterations 3 and 6, and no tracker file."""
    for iteration in (3, 6):
        state = {"iteration": iteration, "model": {"weight": torch.full((64,), float(iteration))}}
        dcp.save(state, checkpoint_id=tmp_path / "saved" / f"iter_{iteration:07d}", no_dist=True)
    return tmp_path / "saved"


def test_a_checkpoint_of_torch_dcp_that_no_tracker_file_names_is_not_replaced(of_dcp: Path) -> None:
    """Nor a damaged one; of a save that was killed there is no ``.metadata``."""
    for damage, newest in (("", 6), ("emptied", 6), ("deleted", 3)):
        if damage:
            DAMAGES[damage](of_dcp / NEWEST / ".metadata")
        with raises(CheckpointError, f"iteration {newest}", "iteration 0", f"--load {of_dcp}"):
            claim(str(of_dcp), None, None, finetune=False)


def test_the_newest_whole_checkpoint_of_torch_dcp_is_loaded_without_a_tracker_file(of_dcp: Path) -> None:
    assert choose(of_dcp, None) == 6
    DAMAGES["cut"](of_dcp / NEWEST / SHARD)
    assert choose(of_dcp, None) == 3
    shutil.rmtree(of_dcp / NEWEST)  # of one alone, too, which is no rest of a first save
    assert choose(of_dcp, None) == 3


def test_every_share_of_the_files_is_checked_by_one_rank(saved: Path) -> None:
    for name in FILES[:2]:
        flip(saved / NEWEST / name, 100)
    found = [damages(saved / NEWEST, rank, 2) for rank in range(2)]
    assert [len(one) for one in found] == [1, 1]
    assert sorted(found[0] + found[1]) == sorted(damages(saved / NEWEST))


def test_a_digest_follows_the_writer(saved: Path) -> None:
    """Also over a file that an interrupted save has left, in pieces, and where the file was changed after it was written."""
    made, shard = saved / NEWEST, saved / NEWEST / SHARD
    content = shard.read_bytes()
    with digested(shard), shard.open("wb") as stream:
        for at in range(0, len(content), 1000):
            stream.write(content[at : at + 1000])
            stream.flush()
    assert (made / f"{SHARD}.sha256").read_text().split()[0] == hashlib.sha256(content).hexdigest()
    write_manifest(made)
    assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
    assert not damages(made)
    with digested(shard):
        shard.write_bytes(content)
    shard.write_bytes(content + b"more")
    later = (made / f"{SHARD}.sha256").stat().st_mtime_ns + 1
    os.utime(shard, ns=(later, later))
    write_manifest(made)
    assert not damages(made)


FAILURES = {
    "a file left by another user": (Path, "unlink", PermissionError(1, "Operation not permitted")),
    "no more threads": (threading.Thread, "start", RuntimeError("can't start new thread")),
    "unreadable": (Path, "exists", PermissionError(13, "Permission denied")),
    "a full disk": (integrity, "replace", OSError(28, "No space left on device")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_digest_that_fails_does_not_fail_the_save(saved: Path, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron waits for its writer, who has told nothing yet, without end."""
    holder, name, error = FAILURES[failure]
    made, shard = saved / NEWEST, saved / NEWEST / SHARD
    (made / f"{SHARD}.sha256").write_text("of another save")
    os.utime(shard.with_name(f"{SHARD}.sha256"), ns=(0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(holder, name, mock.Mock(side_effect=error))
        with digested(shard):
            shard.write_bytes(b"content")
    write_manifest(made)
    assert not damages(made)


def test_a_digest_of_an_interrupted_save_is_removed(saved: Path) -> None:
    known = saved / NEWEST / f"{SHARD}.sha256"
    known.write_text("of another save")
    with digested(saved / NEWEST / SHARD):
        assert not known.exists()


def test_no_code_of_the_metadata_is_run(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made by the checkpoint"
    (saved / NEWEST / ".metadata").write_bytes(pickle.dumps(Code(made)))
    write_manifest(saved / NEWEST)
    with raises(CheckpointError, f"{saved / NEWEST}/.metadata", "posix.mkdir", saved / OLDER, code="damaged"):
        choose(saved, None)
    with raises(CheckpointError, f"{saved / NEWEST}/.metadata", "posix.mkdir"):
        newest_iteration(saved / NEWEST)
    assert not made.exists()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_two_runs_do_not_save_in_one_folder(saved: Path) -> None:
    """The lock of a killed run does not hold, though a process that it has forked lives on."""
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        os.setsid()
        claim(str(saved), str(saved), None, finetune=False)
        if os.fork():
            os.write(writing, b"claimed")
        time.sleep(600)
        os._exit(1)
    try:
        assert os.read(reading, 7) == b"claimed"
        with raises(CheckpointError, f"process {holder}", saved):
            claim(str(saved), str(saved), None, finetune=False)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        claim(str(saved), str(saved), None, finetune=False)
        assert (saved / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    finally:
        os.killpg(holder, signal.SIGKILL)


@pytest.mark.parametrize(("load", "step", "finetune"), [(None, None, False), ("saved", None, True), ("older", None, False)])
def test_a_run_that_starts_before_the_newest_checkpoint_is_refused(
    saved: Path, load: str | None, step: int | None, finetune: bool
) -> None:
    (saved.parent / "older").mkdir()
    (saved.parent / "older" / TRACKER).write_text("5")
    start = 5 if load == "older" else 0
    with raises(CheckpointError, "iteration 6", f"iteration {start}", f"--load {saved}"):
        claim(str(saved), load and str(saved.parent / load), step, finetune=finetune)
    assert read_tracker(saved) == "6"


@pytest.mark.parametrize("tracker", [None, "3", "release"])
@pytest.mark.parametrize("load", [None, "older"])
def test_a_whole_checkpoint_that_no_tracker_file_names_is_not_replaced(
    saved: Path, tracker: str | None, load: str | None
) -> None:
    """The file is lost, or was cut: 100 may have become 10."""
    (saved.parent / "older").mkdir()
    (saved.parent / "older" / TRACKER).write_text("5")
    (saved / TRACKER).unlink()
    if tracker is not None:
        (saved / TRACKER).write_text(tracker)
    with raises(CheckpointError, "iteration 6", f"iteration {5 if load else 0}", f"--load {saved}"):
        claim(str(saved), load and str(saved.parent / load), None, finetune=False)
    for name in (NEWEST, OLDER):  # as a save that was killed leaves it
        (saved / name / "metadata.json").unlink()
    claim(str(saved), str(saved.parent / "older"), None, finetune=False)


@pytest.mark.parametrize("step", [None, 6])
def test_a_damaged_checkpoint_does_not_lead_back_behind_those_of_another_folder(saved: Path, step: int | None) -> None:
    """An earlier one is loaded in its place where that is set."""
    other = saved.parent / "other"
    shutil.copytree(saved / OLDER, other / "iter_0000005")
    (other / TRACKER).write_text("5")
    flip(saved / NEWEST / SHARD, 100)
    claim(str(other), str(saved), step, finetune=False)  # choose() refuses it
    checkpoint_folder.release()
    checkpoint_folder.load_newest_whole = True
    with raises(CheckpointError, f"{other} has", "iteration 5", "iteration 3", f"--load {other}"):
        claim(str(other), str(saved), step, finetune=False)
    flip(saved / NEWEST / SHARD, 100)
    claim(str(other), str(saved), step, finetune=False)


def test_a_step_in_the_folder_itself_says_what_it_replaces(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, says in ((3, f"{saved} has a checkpoint of iteration 6: this run, from --ckpt-step 3, rep"), (6, "")):
        claim(str(saved), str(saved), step, finetune=False)
        checkpoint_folder.release()
        output = capsys.readouterr().out
        assert says in output if says else not output


def test_a_run_that_replaces_nothing_is_not_refused(saved: Path) -> None:
    (saved.parent / "link").symlink_to(saved)
    other = saved.parent / "other"
    other.mkdir()
    (other / TRACKER).write_text("9")
    for save, load in ((saved, saved), (saved, saved.parent / "link"), (saved, other), (saved.parent / "new", None)):
        claim(str(save), load and str(load), None, finetune=False)
        checkpoint_folder.release()
    claim(str(saved.parent / "newer"), str(saved), None, finetune=True)


def test_where_a_run_starts_from_object_storage_is_not_known(saved: Path) -> None:
    claim(str(saved), "msc://bucket/older", None, finetune=False)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), ValueError("null byte"), KeyError("a key")])
def test_any_error_on_rank_0_reaches_all(saved: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """They wait for what it sees."""
    told: list[tuple[object, str]] = []
    monkeypatch.setattr(checkpoint_folder, "gathered", lambda value: told.append(value) or [value])
    monkeypatch.setattr(Path, "glob", mock.Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=re.escape(str(error))):
        choose(saved, None)
    ((found, why),) = told
    assert (found, str(error) in why) == (None, True)


def test_a_lock_of_any_bytes_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / LOCK).write_bytes(b"\xff\xfe")
    monkeypatch.setattr(fcntl, "lockf", mock.Mock(side_effect=BlockingIOError(11, "held")))
    with raises(CheckpointError, saved, "--save"):
        claim(str(saved), None, None, finetune=False)


def test_a_folder_that_another_host_does_not_see_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    def gathered(one: object) -> list[object]:
        told.append(one)
        return [True, False] if one is True else [one]

    monkeypatch.setattr(checkpoint_folder, "gathered", gathered)
    with raises(CheckpointError, saved, "rank 1", code="not-shared"):
        claim(str(saved), str(saved), None, finetune=False)
    assert checkpoint_folder._lock_file is None
    assert True in told
    assert [path.name for path in saved.glob(f"{LOCK}*")] == [LOCK]
    assert not checkpoint_folder._sees(saved / "nothing", 0.0)


def test_other_ranks_look_for_a_closed_file_and_not_too_long(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store publishes a file when it is closed; a rank that looks longer than collectives wait names nothing."""
    looked: list[tuple[Path, float]] = []

    def sees(path: Path, within_s: float) -> bool:
        assert path.parent == saved
        assert path.read_text().startswith(f"process {os.getpid()} on ")
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                assert descriptor.readlink() != path
        looked.append((path, within_s))
        return True

    monkeypatch.setattr(checkpoint_folder, "_sees", sees)
    left = saved / f"{LOCK}.of a start that was killed"
    left.write_text("process 1 on another host")
    for minutes in (1, 10):
        claim(str(saved), str(saved), None, finetune=False, timeout_minutes=minutes)
        assert [path.name for path in saved.glob(f"{LOCK}*")] == [LOCK]
        checkpoint_folder.release()
    assert [seconds for _, seconds in looked] == [30, 60]
    assert looked[0][0] != looked[1][0]


def test_only_rank_0_looks_for_links_to_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rank raised alone, the others would wait for."""
    of_rank_0 = iter([(("6", None, [3], False, False), None), (None, "6 is a link to nothing")])
    monkeypatch.setattr(checkpoint_folder, "rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(checkpoint_folder, "gathered", lambda one: [next(of_rank_0)] if one == (None, None) else [one])
    monkeypatch.setattr(checkpoint_folder, "_refuse_dangling", lambda _: pytest.fail("rank 1 looked"))
    monkeypatch.setattr(checkpoint_folder, "load_newest_whole", True)
    (saved / NEWEST / SHARD).unlink()
    (saved / NEWEST / "integrity.json").unlink()
    with pytest.raises(CheckpointError, match="6 is a link to nothing"):
        choose(saved, None)


def test_metadata_of_the_wrong_kind_is_a_damage(saved: Path) -> None:
    """Not an error of the rank that reads it, for which the others would wait."""
    (saved / NEWEST / "integrity.json").unlink()
    (saved / NEWEST / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (saved / NEWEST / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=[7])))
    (damage,) = damages(saved / NEWEST)
    assert damage.startswith(".metadata: damaged (AttributeError(")


def test_a_folder_that_cannot_be_saved_in_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/link .*nowhere"):
        claim(str(tmp_path / "link"), None, None, finetune=False)
    (tmp_path / "file").write_text("")
    with raises(CheckpointError, f"--save {tmp_path / 'file'}"):
        claim(str(tmp_path / "file"), None, None, finetune=False)
