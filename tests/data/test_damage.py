"""Damaged datasets: each kind is named and refused, and no header makes a reader crash."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacpp_mcore.data import manifest as manifest_module
from megacpp_mcore.data.index import HEADER_BYTES, read_index
from megacpp_mcore.data.manifest import adopt, load_manifest, verify, verify_for_training
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.score import unigram_bits_per_byte
from megacpp_mcore.errors import DataError
from tests.errors import raises

SUFFIXES = (".bin", ".idx", ".manifest.json")


def build(folder: Path, salt: str = "") -> str:
    folder.mkdir(parents=True)
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document {number}{salt}" * (number + 1))
    return prepare([folder], str(folder / "data"))[0]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return build(tmp_path_factory.mktemp("pristine") / "a")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here is about losing power


@pytest.fixture
def prefix(pristine, tmp_path):
    for suffix in SUFFIXES:
        shutil.copy(pristine + suffix, tmp_path / f"data{suffix}")
    return str(tmp_path / "data")


def check_training(prefix: str, **options) -> None:
    verify_for_training([prefix], **{"vocab_size": 260, "eod_id": 256, **options})


def rebuild(prefix: str, documents: list[list[int]], dtype: type = np.uint16) -> None:
    """Write a dataset of these documents with Megatron's builder, and no manifest."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(prefix + ".idx")
    Path(prefix + ".manifest.json").unlink(missing_ok=True)


def test_a_whole_dataset_passes(prefix):
    assert verify(prefix).documents == 6
    check_training(prefix)
    check_training(prefix, vocab_size=384, eod_id=None)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_and_empty_files_are_named(prefix, pristine, suffix):
    for damage in (lambda path: path.write_bytes(b""), os.unlink):
        damage(Path(prefix + suffix))
        for check in (verify, check_training):
            with raises(DataError, f"data{suffix}"):
                check(prefix)
        with raises(DataError, f"data{suffix}"):  # every prefix is checked
            verify_for_training([pristine, prefix], vocab_size=260)


@pytest.mark.parametrize("suffixes", [(".bin",), (".idx",), (".bin", ".idx"), (".manifest.json",)])
def test_swapped_files_are_found(prefix, tmp_path, suffixes):
    other = build(tmp_path / "other", "!")
    for suffix in suffixes:
        shutil.copy(other + suffix, prefix + suffix)
    for check in (verify, check_training):
        with pytest.raises(DataError, match=r"data\.(bin|idx): found .* expected"):
            check(prefix)


def test_a_value_of_the_manifest_that_was_changed_is_found(prefix):
    path = Path(prefix + ".manifest.json")
    path.write_text(path.read_text().replace("prepare", "adopted", 1))
    with raises(DataError, "data.manifest.json", "checksum"):
        load_manifest(prefix)


def test_remembered_hashes_do_not_outlive_a_change(prefix):
    check_training(prefix)
    remembered = Path(prefix + ".verified.json").read_bytes()
    status = os.stat(prefix + ".bin")
    with open(prefix + ".bin", "r+b") as stream:
        stream.write(b"D")
    os.utime(prefix + ".bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=r"data\.bin: .* SHA-256"):
        check_training(prefix)
    assert Path(prefix + ".verified.json").read_bytes() != remembered


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"identity": 3, "sha256": 4}', b"\xff"])
def test_a_damaged_memory_is_no_answer(prefix, content):
    Path(prefix + ".verified.json").write_bytes(content)
    check_training(prefix)
    first, *rest = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(bytes([first ^ 1, *rest]))
    Path(prefix + ".verified.json").write_bytes(content)
    with pytest.raises(DataError, match="SHA-256"):
        check_training(prefix)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("check", [verify, check_training, unigram_bits_per_byte])
def test_files_that_may_not_be_read_are_named(prefix, monkeypatch, suffix, check):
    """As the system refuses them to one who may not; root may read everything."""
    opened = open

    def refuse(path, *rest, **options):
        if str(path) == prefix + suffix:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *rest, **options)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=rf"data{re.escape(suffix)}.*Permission denied"):
        check(prefix)


def test_remembered_hashes_are_used(prefix, monkeypatch):
    hashed, original = [], manifest_module.hash_file
    monkeypatch.setattr(manifest_module, "hash_file", lambda path: hashed.append(path) or original(path))
    for _ in range(2):
        check_training(prefix)
    assert hashed == [prefix + ".idx", prefix + ".bin", prefix + ".idx"]


@pytest.mark.parametrize("size", [0, 2, -2])
def test_adoption_refuses_tokens_that_the_index_does_not_describe(prefix, size):
    with open(prefix + ".idx", "r+b") as stream:
        stream.seek(17)
        stream.write(bytes([6]))  # no type of integers
    with raises(DataError, "code 6"):
        read_index(prefix)
    rebuild(prefix, [[5, 256], [7, 256]])
    content = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(content[:size] if size <= 0 else content + bytes(size))
    with raises(DataError, "data.bin", f"{(8 + size) if size else 0} bytes", "8 bytes"):
        adopt(prefix)


@pytest.mark.parametrize("bounds", [(0, 2, 1, 2), (1, 1, 2, 2), (0, 1, 2, 3)])
def test_adoption_refuses_document_bounds_that_do_not_rise_to_the_end(prefix, bounds):
    rebuild(prefix, [[5, 256], [7, 256]])
    content = bytearray(Path(prefix + ".idx").read_bytes()[: HEADER_BYTES + 2 * 12])
    struct.pack_into("<Q", content, 26, len(bounds))
    Path(prefix + ".idx").write_bytes(content + struct.pack("<4q", *bounds))
    with raises(DataError, f"{bounds[0]} to {bounds[-1]}", "0 to 2"):
        adopt(prefix)


def test_adoption_checks_and_guesses_nothing(prefix):
    with raises(DataError, "data.manifest.json", code="exists"):
        adopt(prefix)
    rebuild(prefix, [[5, 9, 7], [8, 7]], np.int32)
    manifest = adopt(prefix)
    assert manifest == load_manifest(prefix) == verify(prefix)
    assert (manifest.dtype, manifest.documents, manifest.tokens, manifest.max_token_id) == ("int32", 2, 5, 9)
    assert set(manifest.tokenizer.values()) == {None}
    verify_for_training([prefix], vocab_size=10, eod_id=256)
    with raises(DataError, 10, 9, code="vocabulary"):
        verify_for_training([prefix], vocab_size=9)


@pytest.mark.parametrize(
    ("documents", "said", "code", "values"),
    [
        ([[5, 256], [7]], {"eod_id": 256}, "", ["document 1", "id 7", 256]),
        ([[5, 256], []], {"eod_id": 256}, "", ["document 1", "no token", 256]),
        ([[], [5, 256]], {"eod_id": 256}, "", ["document 0", "no token", 256]),
        ([[300, 256]], {"vocab_size": 260}, "", ["256 to 300", "0 to 259"]),
        ([[-2, 1]], {}, "", ["-2 to 1", "0 or more"]),
        ([[]], {}, "", ["data.idx", "no tokens"]),
    ],
)
def test_adoption_refuses_a_dataset_that_is_not_what_is_said(prefix, documents, said, code, values):
    rebuild(prefix, documents, np.int32)
    with raises(DataError, *values, code=code):
        adopt(prefix, **said)
    assert not os.path.exists(prefix + ".manifest.json")


def try_index(prefix: str, content: bytes) -> None:
    """Read a changed index: it is refused, or Megatron's own reader can read all that it promises."""
    Path(prefix + ".idx").write_bytes(content)
    try:
        index = read_index(prefix)
    except DataError:
        return
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    stock = IndexedDataset(prefix)
    tokens = np.concatenate([stock[number] for number in range(len(stock))])
    assert tokens.tobytes() == Path(prefix + ".bin").read_bytes()
    assert index.tokens == tokens.size


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found_and_named(prefix, pristine, data):
    changed = []
    for suffix in SUFFIXES:
        whole = Path(pristine + suffix).read_bytes()
        content = bytearray(whole)
        for _ in range(data.draw(st.sampled_from([0, 1, 3]), label=f"damage {suffix}")):
            start = data.draw(st.integers(0, len(content)))
            stop = data.draw(st.sampled_from([start, start + 1, start + 8, len(content)]))
            content[start:stop] = data.draw(st.binary(max_size=20))
        Path(prefix + suffix).write_bytes(content)
        if bytes(content) != whole:
            changed.append(suffix)
        if suffix == ".idx":
            try_index(prefix, bytes(content))
    if not changed:
        check_training(prefix)
        return
    with contextlib.suppress(DataError):  # white space at the end of a manifest is no part of it
        if load_manifest(prefix) == load_manifest(pristine):
            changed = [suffix for suffix in changed if suffix != ".manifest.json"]
    for check in (verify, check_training) if changed else ():
        with pytest.raises(DataError, match=rf"data({'|'.join(map(re.escape, changed))})\b"):
            check(prefix)
