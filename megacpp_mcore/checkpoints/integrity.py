"""Digests of a checkpoint's files, and the check of a checkpoint before anything in it is loaded.

The manifest is the ``integrity.json`` of Megatron's ``--verify-integrity`` (megatron-core 0.19.2,
``core/dist_checkpointing/validation.py``), which can check ours, too. Ours also has a seal, the digest of its own content, and
is announced in ``metadata.json``, so that a damaged or missing manifest is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import threading
import uuid
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.util.files import TEMPORARY, replace, sha256_of

MANIFEST = "integrity.json"
CONFIG = "metadata.json"
METADATA = ".metadata"
COMMON = "common_state/shard_0_1"
"""Megatron's name for the state that is the same on all ranks."""

_ID = "manifest_id"
"""Key in the manifest and in ``metadata.json``, where Megatron ignores keys that it does not know."""
_SUFFIX = ".sha256"
"""Of the file that holds another file's digest until the manifest has been written."""
_CHUNK = 1 << 23
_POLL_S, _LONGEST_PAUSE_S = 0.005, 0.2

_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_CLASSES = {
    "torch": "Size " + " ".join(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    "torch.serialization": "_get_layout",
    f"{_CHECKPOINT}.filesystem": "_StorageInfo _StoragePrefix",
    f"{_CHECKPOINT}.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_CHECKPOINT}.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",  # before 0.16
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}
"""What a ``.metadata`` file of Megatron or torch consists of besides plain values: names, by module."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of ``.metadata`` files that looks up nothing but :data:`_METADATA_CLASSES`."""

    def find_class(self, module: str, name: str) -> Any:
        """Find the class ``name`` of ``module``; UnpicklingError if it is not on the list."""
        if name not in _METADATA_CLASSES.get(module, "").split():
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the ``.metadata`` file in ``folder`` without running code from it.

    Raises:
        CheckpointError: it cannot be read, or is something else.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
    except Exception as error:  # a damaged pickle can raise anything
        is_newer = "too many values to unpack" in str(error)  # strides, which only torch 2.15 has in a TensorProperties
        advice = (
            f"a newer torch saved it (strides came with 2.15), and {torch.__version__} cannot read it: load it with that torch"
            if is_newer
            else "restore it from a copy, or name another iteration"
        )
        raise CheckpointError(f"{path} cannot be read ({error!r}); {advice}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds {type(metadata).__name__}, expected Metadata; name another iteration")
    return metadata


class _Unknown:
    """Stands for an object of a class that is not looked up."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain values: anything of another class becomes :class:`_Unknown`, and tensors None."""

    def find_class(self, module: str, name: str) -> Any:
        """Return argparse's Namespace, or a class that stands for all others."""
        return Namespace if (module, name) == ("argparse", "Namespace") else _Unknown

    def persistent_load(self, _: Any) -> None:
        """Read no storage."""


def read_common(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Read the plain values of Megatron's common state in ``folder``, if any, by name; the run's arguments are among them.

    No code from it is run.

    Raises:
        CheckpointError: it cannot be read.
    """
    place: Any = next((info for index, info in metadata.storage_data.items() if index.fqn == COMMON), None)
    path = folder / (place.relative_path if place is not None else "common.pt")
    if place is None and not path.exists():
        return {}
    try:
        with open(path, "rb") as stream:
            stream.seek(0 if place is None else place.offset)
            content = stream.read(-1 if place is None else place.length)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (name,) = (member for member in archive.namelist() if member.endswith("data.pkl"))
            state = _PlainUnpickler(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); restore it from a copy, or name another iteration"
        ) from error
    state = state[0] if isinstance(state, list) and state else state
    return state if isinstance(state, dict) else {}


@contextlib.contextmanager
def digested(path: Path) -> Iterator[None]:
    """Compute the digest of the file that is written to ``path`` in the context, in a thread that reads what has been written.

    The digest goes to a file next to it, for :func:`write_manifest`, which computes those that are missing: no error here fails
    the save, and Megatron would wait forever for a writer that raises outside of its own handler.
    """
    digest_file, written = path.with_name(path.name + _SUFFIX), threading.Event()
    thread = threading.Thread(target=_follow, args=(path, digest_file, written))
    with contextlib.suppress(OSError, RuntimeError):
        for leftover in (digest_file, path):  # by an interrupted save: the thread would read that
            leftover.unlink(missing_ok=True)
        thread.start()
    try:
        yield
    finally:
        written.set()
        if thread.is_alive():
            thread.join()


def save_with_digests(save: Callable[..., None], rank: int, write_buckets: list[Any], results: Any) -> None:
    """Write a rank's files with Megatron's ``save``, each :func:`digested`; a spawned worker finds this function by its name.

    ``save`` is ``FileSystemWriterAsync.write_preloaded_data_multithread`` without its first arguments; ``write_buckets`` has
    the path, key and content of each file.
    """
    with contextlib.ExitStack() as files:
        for path, *_ in write_buckets:
            files.enter_context(digested(Path(path)))
        save(rank, write_buckets, results)


def _follow(path: Path, digest_file: Path, written: threading.Event) -> None:
    """Hash ``path`` as it grows until ``written`` is set, and write ``digest_file``; nothing if it never appears."""
    with contextlib.suppress(OSError):
        pause_s = _POLL_S
        while not path.exists():
            if written.wait(pause_s) and not path.exists():
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)  # a writer's later files begin when its last one is there
        digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK))
        with open(path, "rb", buffering=0) as stream:
            while True:
                is_last = written.is_set()  # before the read
                if size := stream.readinto(chunk):
                    digest.update(chunk[:size])
                elif is_last:
                    return replace(digest_file, digest.hexdigest().encode())
                else:
                    written.wait(_POLL_S)


def write_manifest(folder: Path) -> None:
    """Write the manifest of the checkpoint in ``folder``; on one rank, once all other files have been written.

    Digests left by :func:`digested` are used, and those of other files computed.

    Raises:
        OSError: a file cannot be read or written.
    """
    config, manifest_id = folder / CONFIG, uuid.uuid4().hex
    if config.exists():
        replace(config, json.dumps({**json.loads(config.read_bytes()), _ID: manifest_id}).encode())

    def digest_of(path: Path) -> str:
        digest_file = path.with_name(path.name + _SUFFIX)
        is_newer = digest_file.exists() and digest_file.stat().st_mtime_ns >= path.stat().st_mtime_ns
        return digest_file.read_text() if is_newer else sha256_of(path)

    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != _SUFFIX]
    paths = [path for path in paths if path.name != MANIFEST and TEMPORARY not in path.name]
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest_of, paths))
    files = dict(zip((path.name for path in paths), digests, strict=True))
    replace(folder / MANIFEST, _manifest_text(files, manifest_id).encode())
    for path in folder.glob(f"*{_SUFFIX}"):
        path.unlink()


def _manifest_text(files: dict[str, str], manifest_id: str) -> str:
    content = {"algorithm": "sha256", "files": files, _ID: manifest_id}
    return json.dumps({**content, "seal": hashlib.sha256(json.dumps(content).encode()).hexdigest()}, indent=2)


class Unreadable(str):
    """Not damage: a file that this user may not read."""


def damages(folder: Path, rank: int = 0, world_size: int = 1, *, by_digests: bool = True) -> list[str]:
    """List what is wrong with the checkpoint of an iteration in ``folder``: for each damaged file, its name and the damage.

    Without a manifest (a checkpoint of stock Megatron, or of an earlier version) only ``.metadata``, ``metadata.json`` and the
    sizes of files are checked, and in the format ``torch`` the sums that its zip files have of their records.

    Args:
        rank, world_size: the ``rank``-th of ``world_size`` shares of the files is checked.
        by_digests: whether a manifest is used, or those sums.
    """
    try:
        if not any((folder / name).exists() for name in (CONFIG, METADATA, MANIFEST)):
            if folder.is_symlink() and not folder.exists():
                return [f"it is a link to {folder.readlink()}, which does not exist"]
            if not any(folder.glob("mp_rank_*")):
                return [f"{METADATA}: not found, nor any other file of a checkpoint"]
            if empty := [path.name for path in sorted(folder.glob("mp_rank_*")) if not any(path.glob("*.pt"))]:
                return [f"{name}: has no file of a checkpoint (.pt)" for name in empty]
            share = torch_files(folder)[rank::world_size] if by_digests else []
            with ThreadPoolExecutor(max_workers=8) as pool:
                return [fault for fault in pool.map(_zip_damage, share) if fault]
        files = _manifest(folder) if by_digests else None
        if files is None:
            return _structural_damages(folder) if rank == 0 else []
        with ThreadPoolExecutor(max_workers=8) as pool:
            names = sorted(files)[rank::world_size]
            faults = [fault for fault in pool.map(lambda name: _damage(folder / name, files[name]), names) if fault]
        if METADATA in names and not faults:
            read_metadata(folder)  # refuses code, also with a matching digest
        return faults
    except Exception as error:  # a damaged pickle can hold anything; the other ranks wait for an answer
        damage = str(error) if isinstance(error, CheckpointError | OSError) else f"{METADATA}: damaged ({error!r})"
        return [Unreadable(damage) if isinstance(error.__cause__ or error, PermissionError) else damage]


def torch_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint in the format ``torch``."""
    return sorted(folder.glob("mp_rank_*/*.pt"))


def _zip_damage(path: Path) -> str | None:
    """Compare the CRC-32 sums in a file of ``torch.save`` with its records, as ``torch.load`` does not."""
    name = f"{path.parent.name}/{path.name}"
    try:
        path.open("rb").close()
        torch._C.PyTorchFileReader(str(path))  # refuses headers that Python's reader takes
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except PermissionError as error:
        return Unreadable(f"{name}: {error}")
    except Exception as error:  # a damaged header can raise anything
        return f"{name}: damaged ({error!r})"
    return None if record is None else f"{name}: its record {record} is not what was saved"


def _manifest(folder: Path) -> dict[str, str] | None:
    """Read the digests in the manifest; None if the checkpoint was saved without one."""
    path = folder / MANIFEST
    try:
        announced = json.loads((folder / CONFIG).read_bytes()).get(_ID)
    except (OSError, ValueError, AttributeError):
        announced = None
    if not path.exists():
        if announced is not None:
            raise CheckpointError(f"{MANIFEST}: not found, though {CONFIG} names it")
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        files: dict[str, str] = content["files"]
        is_ours = announced is not None or _ID in content
        is_whole = text == _manifest_text(files, content[_ID]) if is_ours else content["algorithm"] == "sha256"
        if not (is_whole and all(isinstance(name, str) for name in files.values())):
            raise ValueError("it does not match its own digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST}: damaged ({error!r})") from error
    if announced is not None and content[_ID] != announced:
        raise CheckpointError(f"{CONFIG}, {MANIFEST}: one of them is damaged, or belongs to another checkpoint")
    return files


def _damage(path: Path, digest: str) -> str | None:
    try:
        return None if sha256_of(path) == digest else f"{path.name}: its content is not what was saved"
    except FileNotFoundError:
        return f"{path.name}: not found"
    except OSError as error:
        problem = f"{path.name}: cannot be read ({error})"
        return Unreadable(problem) if isinstance(error, PermissionError) else problem


def _structural_damages(folder: Path) -> list[str]:
    """List what is wrong with a checkpoint without a manifest, according to its metadata."""
    config = folder / CONFIG
    if not config.exists() and COMMON.encode() in (folder / METADATA).read_bytes():
        return [f"{CONFIG}: not found"]
    if config.exists():
        try:
            if "sharded_backend" not in json.loads(config.read_bytes()):
                raise ValueError("it names no sharded_backend")
        except (ValueError, TypeError) as error:
            return [f"{CONFIG}: damaged ({error})"]
    ends: dict[str, int] = {}
    for place in read_metadata(folder).storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    problems = []
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size is None or size < end:
            problems.append(f"{name}: not found" if size is None else f"{name}: has {size} bytes, of at least {end}")
    return problems
