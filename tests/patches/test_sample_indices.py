"""The patch sample-indices: whatever happened to cached indices, a start trains with those that were built, or says why not."""

from __future__ import annotations

import concurrent.futures
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import DataError
from megacpp_mcore.patches import sample_indices
from tests import stock
from tests.errors import raises
from tests.saved import flip

ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLENDED = ("dataset_index", "dataset_sample_index")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    for name in "ab":
        texts = folder / name
        texts.mkdir()
        for number in range(20 if name == "a" else 23):
            (texts / f"{number}.txt").write_text(f"document {number} of {name}")
    return [prepare([str(folder / name)], str(folder / f"{name}_text"))[0] for name in "ab"]


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with stock.patched(sample_indices.PATCH):
        yield


def builder_of(cache: Path | str, sizes: list[int], **how: Any) -> Any:
    """What stock builds datasets with, on a command line that says no more."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=260, eod_id=256, pad_id=258
    )
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, path_to_cache=str(cache), **how,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)


def build(prefixes: list[str], cache: Path, **how: Any) -> list[np.ndarray]:
    """What stock trains with: the indices of a blend and of its datasets."""
    blend_per_split = [(prefixes, [1.0] * len(prefixes)), None, None]
    builder = builder_of(cache, [30, 0, 0], blend_per_split=blend_per_split, **how)
    blend, config = builder.build()[0], builder.config
    assert config.path_to_cache == str(cache)
    assert all(dataset.config is config for dataset in (blend, *blend.datasets))
    arrays = [np.array(getattr(dataset, name)) for dataset in blend.datasets for name in ARRAYS]
    return arrays + [np.array(getattr(blend, name)) for name in BLENDED]


def same(actual: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(actual, expected, strict=True))


def index(cache: Path, name: str) -> Path:
    return sorted(cache.glob(f"*-{name}.npy"))[0]


def cut(cache: Path, name: str) -> None:
    file = index(cache, name)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def swap_entries(cache: Path, name: str) -> None:
    file = index(cache, name)
    array = np.load(file)
    np.save(file, array[::-1])


def swap_files(cache: Path, name: str) -> None:
    first, second, *_ = [*sorted(cache.glob(f"*-{name}.npy")), index(cache, "shuffle_index")]
    kept = first.read_bytes()
    shutil.copyfile(second, first)
    second.write_bytes(kept)


def flip_a_bit(cache: Path, name: str) -> None:
    flip(index(cache, name), -1)


def empty(cache: Path, name: str) -> None:
    index(cache, name).write_bytes(b"")


def delete(cache: Path, name: str) -> None:
    index(cache, name).unlink()


@pytest.mark.parametrize(
    ("damage", "name"),
    [(damage, "sample_index") for damage in (cut, swap_entries, swap_files, empty, delete)]
    + [(flip_a_bit, name) for name in (*ARRAYS, *BLENDED)],
)
def test_damaged_indices_are_named_and_built_anew(
    prefixes: list[str], tmp_path: Path, damage: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = build(prefixes, tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    damage(tmp_path, name)
    capsys.readouterr()
    assert same(build(prefixes, tmp_path), expected)
    output = capsys.readouterr().out
    assert name in output
    assert "the sample indices are built anew" in output
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert same(build(prefixes, tmp_path), expected)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", ["", "{", "[]x", "null", "[1]"])
def test_damaged_digests(prefixes: list[str], tmp_path: Path, content: str) -> None:
    expected = build(prefixes, tmp_path)
    for record in tmp_path.glob("*-sha256.json"):
        assert set(json.loads(record.read_text())) < {path.name for path in tmp_path.iterdir()}
        record.write_text(content)
    assert same(build(prefixes, tmp_path), expected)


def test_indices_of_stock_without_digests_are_not_trusted(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = build(prefixes, tmp_path)
    swap_entries(tmp_path, "shuffle_index")
    for record in tmp_path.glob("*-sha256.json"):
        record.unlink()
    assert same(build(prefixes, tmp_path), expected)
    assert capsys.readouterr().out.count("sha256.json does not exist; the sample indices are built anew") == 3


def test_whole_indices_are_read_and_not_written(prefixes: list[str], tmp_path: Path) -> None:
    build(prefixes, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    build(prefixes, tmp_path)
    build(prefixes, tmp_path, fast_cache_load=True, num_dataset_builder_threads=2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_build_that_ends_leaves_no_part(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, save = [], np.save

    def end_at_the_second(*args: Any, **kwargs: Any) -> None:
        saved.append(args)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(*args, **kwargs)

    monkeypatch.setattr(np, "save", end_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        build(prefixes, tmp_path)
    monkeypatch.setattr(np, "save", save)
    recorded = [name for record in tmp_path.glob("*-sha256.json") for name in json.loads(record.read_text())]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".json") == sorted(recorded)
    assert len(recorded) < 11
    capsys.readouterr()
    build(prefixes, tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("how", ["fast_cache_load", "defer_npy_index_mmap"])
def test_nothing_is_built_where_stock_builds_nothing(prefixes: list[str], tmp_path: Path, how: str) -> None:
    flags = "--dataloader-fast-cache-load and --dataloader-defer-npy-index-mmap"
    with raises(DataError, "sha256.json", flags):
        build(prefixes, tmp_path, **{how: True})
    build(prefixes, tmp_path)
    cut(tmp_path, "sample_index")
    with raises(DataError, "sample_index.npy", "SHA-256"):
        build(prefixes, tmp_path, **{how: True})


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"is_initialized": True, "get_rank": rank, "barrier": None, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)


@pytest.mark.parametrize("threads", [1, 3])
def test_another_host_without_them_builds_the_same(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    build(prefixes, tmp_path / "first")
    as_rank(monkeypatch, 1)
    before = torch.distributed.get_rank
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: build(prefixes, tmp_path / "second"), range(threads)))
    assert torch.distributed.get_rank is before
    built = [{path.name: path.read_bytes() for path in (tmp_path / run).glob("[!.]*")} for run in ("first", "second")]
    assert built[0] == built[1]


def test_rank_0_builds_datasets_side_by_side(prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    both, count = threading.Barrier(2), GPTDataset._get_num_tokens_per_epoch
    monkeypatch.setattr(GPTDataset, "_get_num_tokens_per_epoch", lambda self: both.wait(60) * 0 + count(self))
    as_rank(monkeypatch, 0)
    build(prefixes, tmp_path, num_dataset_builder_threads=2)
    assert not list(tmp_path.glob(".*"))


def test_a_rank_of_another_host_builds_under_a_lock_that_nfs_has(
    prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is of files that are open for writing; and one for each dataset."""
    save, held = np.save, []

    def look(path: str, *args: Any, **kwargs: Any) -> None:
        for lock in tmp_path.glob(".*.lock"):
            with lock.open() as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append((lock.name, Path(path).name.startswith(lock.name[1:-5])))
        save(path, *args, **kwargs)

    def flock(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(9, "Bad file descriptor")
        lock_(descriptor, operation)

    lock_ = fcntl.flock
    as_rank(monkeypatch, 1)
    monkeypatch.setattr(np, "save", look)
    monkeypatch.setattr(sample_indices, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=fcntl.LOCK_EX))
    build(prefixes, tmp_path)
    assert len(held) == 2 * len(ARRAYS) + len(BLENDED)
    assert all(is_own for _, is_own in held)
    assert len({name for name, _ in held}) == 3


def test_a_folder_that_cannot_be_written_names_the_flag(prefixes: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(DataError, "file/cache", "--data-cache-path", code="no-cache"):
        build(prefixes, tmp_path / "file" / "cache")


class Unending(int):
    """The tokens of an empty epoch, which are added no more than a thousand times."""

    additions = 0

    def __radd__(self, other: int) -> int:
        self.additions += 1
        if self.additions > 1000:
            raise OverflowError("epochs without end")
        return other


def test_a_split_without_a_token_is_refused_where_stock_counts_epochs_without_end(prefixes: list[str], tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import GPTDataset

    builder = builder_of(tmp_path, [30, 5, 0], blend=(prefixes[:1], None), split="9998,1,1")
    counted = GPTDataset._get_num_epochs
    for method, error in ((counted, DataError), (counted.__wrapped__, OverflowError)):  # type: ignore[attr-defined]
        with pytest.raises(error):
            method(SimpleNamespace(
                num_samples=5, config=builder.config, index_split=SimpleNamespace(name="valid"), indices=[], dataset_path="a"
            ), Unending(0))  # fmt: skip
    with raises(DataError, "the valid split of", "--split 9998,1,1", "0 documents", code="empty-split"):
        builder.build()


def test_a_dataset_without_a_sample_in_a_blend_without_weights_is_named(prefixes: list[str], tmp_path: Path) -> None:
    """Where stock's blend asserts that all weights, then the numbers of samples, are above 0."""
    builder = builder_of(tmp_path, [None, None, None], blend=(prefixes[:2], None), split="9998,1,1")
    with raises(DataError, "split of", prefixes[0], "one sample", "weights", code="empty-split"):
        builder.build()
