"""Preparation: order, splits, a clean start after SIGKILL, and what Megatron reads back."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from megacpp_mcore.data import prepare as prepare_module
from megacpp_mcore.data import sources as sources_module
from megacpp_mcore.data.corpus import find_stdlib_sources, prepare_stdlib_corpus
from megacpp_mcore.data.manifest import load_manifest, verify
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.sources import find_sources, parse_split
from megacpp_mcore.data.tokenizer import train
from megacpp_mcore.errors import DataError
from tests import forks
from tests.data.hugging_face import save_words
from tests.errors import raises

SPLIT = "train=0.7,valid=0.3"


def make_texts(root: Path, files: int = 12) -> Path:
    """Write a folder of text, source and JSON-lines files with a fixed content."""
    rng = random.Random(7)
    for number in range(files):
        folder = root / f"part{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        text = f"file {number}: Füße, 漢字\r\n" + "".join(rng.choices("abc \n", k=rng.randrange(400)))
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8", newline="")
    lines = [json.dumps({"text": f"record {n} " + "x" * rng.randrange(60)}) for n in range(40)]
    (root / "records.jsonl").write_text("\n\n".join(lines) + "\n" + json.dumps({"text": ""}))
    (root / "empty.md").write_text("")
    (root / "picture.png").write_bytes(b"\x89PNG")
    return root


@pytest.fixture
def texts(tmp_path):
    return make_texts(tmp_path / "texts")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces small enough that a file of lines has several."""
    monkeypatch.setattr(prepare_module, "PIECE_BYTES", 700)


def run(inputs, output, **options):
    return prepare(inputs if isinstance(inputs, list) else [inputs], str(output), **options)


def read_outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def read_back(prefix: str) -> list[bytes]:
    """Return the documents as Megatron's own reader has them, checking their ends."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert len(dataset.document_indices) == len(dataset) + 1
    assert all(document[-1] == 256 for document in (dataset[number] for number in range(len(dataset))))
    return [dataset[number][:-1].astype(np.uint8).tobytes() for number in range(len(dataset))]


def test_megatron_reads_the_texts_back_in_order(texts, tmp_path):
    (prefix,) = run(texts, tmp_path / "out" / "data")
    expected = [path.read_bytes() for path in sorted(texts.glob("part*/*.txt"))]
    lines = (texts / "records.jsonl").read_text().splitlines()
    expected += [text.encode() for line in lines if line and (text := json.loads(line)["text"])]
    assert read_back(prefix) == expected
    manifest = verify(prefix)
    assert manifest.documents == 12 + 40
    assert manifest.text_bytes == sum(map(len, expected)) == manifest.tokens - manifest.documents
    assert manifest.dtype == "uint16"
    assert manifest.sources["count"] == 13
    assert manifest.command == "megacpp-mcore data prepare texts --output data --tokenizer byte"
    assert str(tmp_path) not in manifest.to_json().decode()
    assert not (tmp_path / "out" / "data.unfinished").exists()


def test_split_is_stable_and_complete(texts, tmp_path):
    train, valid = run(texts, tmp_path / "a", split=SPLIT)
    assert (train, valid) == (str(tmp_path / "a_train"), str(tmp_path / "a_valid"))
    sides = [set(read_back(train)), set(read_back(valid))]
    assert sides[0].isdisjoint(sides[1])
    (whole,) = run(texts, tmp_path / "whole")
    assert sides[0] | sides[1] == set(read_back(whole))
    (texts / "aaa.txt").write_text("a new file that comes first")
    (texts / "part1" / "01.txt").unlink()
    again = [set(read_back(prefix)) for prefix in run(texts, tmp_path / "b", split=SPLIT)]
    assert again[0].isdisjoint(sides[1])
    assert again[1].isdisjoint(sides[0])
    assert load_manifest(valid).split == {"name": "valid", "of": SPLIT}


@pytest.mark.parametrize(
    "text", ["", "train", "train=x", "a=0.5,b=0.6", "a=1.5,b=-0.5", "a=0.5,a=0.5", "a/b=1", "=1", "a=nan", "a=inf"]
)
def test_bad_splits_are_refused(text):
    with raises(DataError, repr(text), "train=0.98,valid=0.02"):
        parse_split(text)


def test_output_does_not_depend_on_workers_pieces_or_machine(texts, tmp_path, monkeypatch):
    for name, (workers, size) in {"a": (1, 700), "b": (2, 700), "c": (1, 10**6), "d": (1, 150)}.items():
        monkeypatch.setattr(prepare_module, "PIECE_BYTES", size)
        run(texts, tmp_path / name / "data", split=SPLIT, workers=workers)
        assert read_outputs(tmp_path / name) == read_outputs(tmp_path / "a")
    assert len(read_outputs(tmp_path / "a")) == 6


def prepare_until_killed(texts: Path, output: Path, operation: int, overwrite: bool) -> None:
    """Prepare, and die by SIGKILL in place of the given file operation that makes something visible or removes it."""
    left = operation

    def count_down(call):
        def counted(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("replace", "unlink", "rmdir"):
        setattr(os, name, count_down(getattr(os, name)))
    run(texts, output, split=SPLIT, overwrite=overwrite)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("replaces", [False, True])
def test_after_a_kill_at_any_file_operation_no_manifest_lies_and_a_call_starts_anew(texts, tmp_path, replaces):
    run(texts, tmp_path / "whole" / "data", split=SPLIT)
    (tmp_path / "other.txt").write_text("another text")
    (old,) = run(tmp_path / "other.txt", tmp_path / "old" / "data")
    operation, killed, torn = 0, True, 0
    while killed:
        operation += 1
        folder = tmp_path / f"killed{operation}"
        folder.mkdir()
        prefixes = [f"{folder}/data_{name}" for name in ("train", "valid")]
        for prefix, suffix in itertools.product(prefixes if replaces else (), (".bin", ".idx", ".manifest.json")):
            shutil.copy(old + suffix, prefix + suffix)
        arguments = (texts, folder / "data", operation, replaces)
        process = multiprocessing.get_context("fork").Process(target=prepare_until_killed, args=arguments)
        process.start()
        process.join(forks.PATIENCE_S)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed = process.exitcode != 0
        whole = [prefix for prefix in prefixes if os.path.exists(f"{prefix}.manifest.json")]
        torn += len(whole) < 2 and os.path.exists(f"{prefixes[0]}.bin")
        for prefix in whole:
            verify(prefix)
        if any("split" in load_manifest(prefix).command for prefix in whole):  # of the new ones: the others are there, too
            assert all(os.path.exists(prefix + suffix) for prefix in prefixes for suffix in (".bin", ".idx"))
            assert len({os.path.getsize(prefix + ".bin") for prefix in prefixes} - {os.path.getsize(old + ".bin")}) == 2
        if killed:
            run(texts, folder / "data", split=SPLIT, overwrite=os.path.exists(f"{prefixes[0]}.bin"))
        assert read_outputs(folder) == read_outputs(tmp_path / "whole"), operation
    assert torn >= 4


def test_an_interrupt_is_ignored_while_datasets_are_moved(texts, tmp_path, monkeypatch):
    original = os.replace

    def interrupted(old, new):
        original(old, new)
        if Path(new).name == "data.bin":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupted)
    others = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left torchrun's
    try:
        verify(*run(texts, tmp_path / "data"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, others)


@pytest.mark.exhaustive
def test_a_killed_pool_ends_and_the_same_call_starts_anew(tmp_path):
    texts = make_texts(tmp_path / "texts", 60)
    run(texts, tmp_path / "whole" / "data", split=SPLIT)
    (tmp_path / "main.py").write_text(  # the workers import it, too, and wait for what does not come
        "import sys, time\n"
        "from megacpp_mcore.data import prepare\n"
        "read = prepare.read_documents\n"
        "def slowly(piece, *rest):\n"
        "    time.sleep(60 if piece.number == 30 else 0)\n"
        "    return read(piece, *rest)\n"
        "prepare.read_documents = slowly\n"
        "if __name__ == '__main__':\n"
        "    prepare.prepare(sys.argv[1:2], sys.argv[2], split=sys.argv[3], workers=2)\n"
    )
    output = tmp_path / "killed" / "data"
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py"), str(texts), str(output), SPLIT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
    )
    forks.wait_until((tmp_path / "killed/data.unfinished/dataset.0.bin").exists, every_s=0.002)
    process.kill()
    # The workers hold the other end of stderr: it ends when the last of them does.
    process.communicate(timeout=50)
    assert process.returncode == -signal.SIGKILL
    run(texts, output, split=SPLIT)
    assert read_outputs(tmp_path / "killed") == read_outputs(tmp_path / "whole")


def test_a_full_disk_leaves_nothing(texts, tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(prepare_module, "write_manifest", mock.Mock(side_effect=full))
    with pytest.raises(DataError, match="No space left on device"):
        run(texts, tmp_path / "data")
    assert list(tmp_path.iterdir()) == [texts]


def test_existing_datasets_are_kept_unless_told(texts, tmp_path):
    (prefix,) = run(texts, tmp_path / "data")
    before = Path(prefix + ".bin").read_bytes()
    (texts / "new.txt").write_bytes(b"four\xff")
    kept = (False, ["data.bin", "--overwrite"], "exists")
    for overwrite, values, code in (kept, (True, ["new.txt", "offset 4"], ""), kept):
        with raises(DataError, *values, code=code):  # a refused one does not let the next replace a dataset either
            run(texts, prefix, overwrite=overwrite)
        assert Path(prefix + ".bin").read_bytes() == before
        assert not Path(prefix + ".unfinished").exists()
    (texts / "new.txt").write_text("more")
    run(texts, prefix, overwrite=True)
    assert verify(prefix).documents == 53


def test_a_dataset_is_held_by_one_preparation(texts, tmp_path, monkeypatch):
    original = prepare_module._build

    def build_beside_another(*arguments):
        monkeypatch.setattr(prepare_module, "_build", original)
        with raises(DataError, tmp_path / "a", code="held"):
            run(texts, tmp_path / "a", split=SPLIT)
        return original(*arguments)

    monkeypatch.setattr(prepare_module, "_build", build_beside_another)
    for prefix in run(texts, tmp_path / "a", split=SPLIT):
        verify(prefix)
    assert not list(tmp_path.glob("*.unfinished"))


def test_indices_that_megatron_cached_of_a_dataset_are_neither_removed_nor_outlived(texts, tmp_path):
    (prefix,) = run(texts, tmp_path / "data")
    cached = Path(prefix, "cache", "GPTDataset_indices", "0-GPTDataset-train-sample_index.npy")
    cached.parent.mkdir(parents=True)
    cached.write_text("")
    with pytest.raises(DataError, match=str(cached.parent)):
        run(texts, prefix, overwrite=True)
    assert cached.exists()
    verify(prefix)


def test_undecodable_text_is_named_with_its_offset_and_leaves_nothing(texts, tmp_path):
    (texts / "bad.txt").write_bytes(b"four\xff")
    with raises(DataError, texts / "bad.txt", "offset 4", "0xff", "--errors skip"):
        run(texts, tmp_path / "data", workers=2)
    assert list(tmp_path.iterdir()) == [texts]
    (tmp_path / "data.unfinished").mkdir()
    (tmp_path / "data.unfinished" / "thesis.tex").write_text("mine, and it stays")
    (prefix,) = run(texts, tmp_path / "data", skip_errors=True)
    assert [path.name for path in (tmp_path / "data.unfinished").iterdir()] == ["thesis.tex"]
    with raises(DataError, "'valid'", "1 documents"):
        run(texts / "part1" / "01.txt", tmp_path / "other", split=SPLIT)
    assert verify(prefix).documents == 52


@pytest.mark.parametrize(
    ("line", "reason", "offset"),
    [
        (b'{"text": "\xff"}', "byte 0xff", 25),
        (b'{"text": ', "Expecting value", 15),
        (b'{"content": "x"}', "'text'", 15),
        (b'{"text": 3}', "'text'", 15),
        (b"[" * 100_000, "recursion", 15),
        (rb'{"text": "\ud800"}', "surrogates", 15),
    ],
)
def test_unusable_json_lines_are_named_or_listed(tmp_path, line, reason, offset):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"text": "ok"}\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=rf"records\.jsonl, .* {offset}: .*{reason}"):
        run(path, tmp_path / "strict")
    (prefix,) = run(path, tmp_path / "skip", skip_errors=True)
    assert read_back(prefix) == [b"ok", b"fine"]
    (skipped,) = verify(prefix).skipped
    assert (skipped["relative"], skipped["offset"]) == ("records.jsonl", offset)
    assert reason in skipped["reason"]


def test_where_all_was_skipped_the_first_reason_is_said(tmp_path):
    (tmp_path / "some.jsonl").write_text('{"content": "one"}\n{"content": "two"}\n')
    with raises(DataError, "none of 0", "2 were skipped", "some.jsonl", "offset 0", "'content'", "--json-key"):
        run(tmp_path / "some.jsonl", tmp_path / "set", skip_errors=True)


@pytest.mark.parametrize("name", ["SOME.JSONL", "some.ndjson", "some.Json"])
def test_json_lines_are_known_by_their_names(tmp_path, name):
    (tmp_path / name).write_text('{"content": "one", "id": 1}\n{"content": "two", "id": 2}\n')
    (prefix,) = run(tmp_path / name, tmp_path / "set", json_key="content")
    assert read_back(prefix) == [b"one", b"two"]
    assert "--json-key content" in load_manifest(prefix).command
    with raises(DataError, "'content', a str; 'id', a int", "--json-key"):
        run(tmp_path / name, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("lines", b'{"text": "one"}\n{"text": "two"}\n', ["offset 0", "'text'", ".jsonl"]),
        ("mark.json.1", b'\xef\xbb\xbf\n{"text": "one"}\n', ["'text'", ".jsonl"]),
        ("lines.jsonl.gz", b"\x1f\x8b\x08", ["cannot be unpacked", "whole gz file"]),
        ("part-00001", b'{"content": "one"}\n{"content": "two"}\n', ["offset 0", "'content'", ".jsonl", "--json-key"]),
        ("meta.txt", b'{"meta": 1}\n\n{"text": "one"}\n', ["'meta'", ".jsonl", "--json-key"]),
        ("lines.jsonl.xz", b"\xfd7zXZ\x00\x80", ["offset 0", ".xz", "unpack"]),
        ("text.TAR.gz", gzip.compress(b"a.txt\0\0text", mtime=0), [".tar", "unpack"]),
        ("whole.json", b'{\n "text": "one"\n}\n', ["offset 0", "JSON objects", "jq -c ."]),
        ("whole.jsonl", b'[{"text": "one"},\n{"text": "two"}]\n', ["offset 0", "JSON objects", "jq -c '.[]'"]),
        ("list.json", b'[{"text": "one"}]\n', ["'text'", "no object", "jq -c '.[]'"]),
        ("returns.jsonl", b'{"text": "one"}\r{"text": "two"}\r', ["offset 0", "CR alone", "tr"]),
        ("wide.jsonl", '{"text": "one"}\n'.encode("utf-16-le"), ["offset 0", "UTF-16", "iconv"]),
        ("wide.md", "some words".encode("utf-16-be"), ["offset 0", "UTF-16", "iconv"]),
        ("wide.py", "слова и слова".encode("utf-16-le"), ["NUL", "UTF-16", "iconv"]),
        ("cut.jsonl", b'{"text": "one"}\n{"text": "tw', ["offset 16", "cut off"]),
        ("rows.csv", b"id,text\n1,one\n", [".csv is a table", ".txt"]),
        ("rows.TSV.gz", gzip.compress(b"id\ttext\n", mtime=0), [".tsv is a table", ".txt"]),
        ("wide.txt", "words".encode("utf-16"), ["0xff", "UTF-8 text", "UTF-16"]),
        ("packed.txt", gzip.compress(b"text", mtime=0), ["0x8b", "UTF-8 text", ".gz"]),
        ("packed.jsonl", gzip.compress(b'{"text": "one"}', mtime=0), ["0x8b", "JSON objects", ".gz"]),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "one"}\n', ["UTF-8 BOM", "remove it"]),
    ],
)
def test_documents_in_another_form_are_no_text(tmp_path, name, content, values):
    (tmp_path / name).write_bytes(content)
    with raises(DataError, name, *values):
        run(tmp_path / name, tmp_path / "set")


def test_a_glob_takes_tables_as_documents_and_some_nuls_are_text(tmp_path):
    folder, texts = tmp_path / "texts", {"rows.csv": b"id,text\n1,one\n", "log": b"a line\n" + bytes(300), "short": b"abc\0"}
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    run(folder, tmp_path / "set", globs=("*",))
    assert sorted(read_back(str(tmp_path / "set"))) == sorted(texts.values())


def test_documents_without_text_are_counted_and_named(texts, tmp_path, capsys):
    (texts / "more.jsonl").write_text('{"text": ""}\n' * 3 + '{"text": "one"}\n')
    run(texts, tmp_path / "set", workers=2)
    said = "documents without text left out: 5, of them 3 in more.jsonl, 1 in empty.md, 1 in records.jsonl"
    assert said in capsys.readouterr().err.splitlines()
    (tmp_path / "empty.txt").touch()
    with raises(DataError, "none of 0 documents"):
        run(tmp_path / "empty.txt", tmp_path / "other")
    assert "left out: 1, of them 1 in empty.txt" in capsys.readouterr().err


def test_a_json_key_without_json_is_refused(texts, tmp_path):
    text = texts / "part1" / "01.txt"
    with raises(DataError, "--json-key code", text, ".jsonl"):
        run(text, tmp_path / "set", json_key="code")
    with raises(DataError, "--json-key code", text):
        train([text], str(tmp_path / "words"), 300, json_key="code")


def test_a_byte_order_mark_before_text_is_kept(tmp_path):
    (tmp_path / "mark.txt").write_text(text := '\ufeff{"content": "one"}\nis an object')
    (prefix,) = run(tmp_path / "mark.txt", tmp_path / "set")
    assert read_back(prefix) == [text.encode()]


def test_a_packed_file_gives_what_it_holds(texts, tmp_path, capsys):
    """Lines longer and shorter than a piece, in one and two processes; offsets are those of the unpacked text."""
    records = texts / "records.jsonl"
    packed = tmp_path / "records.JSONL.gz"
    packed.write_bytes(gzip.compress(records.read_bytes()[:900]) + gzip.compress(records.read_bytes()[900:]))
    (plain,) = run(records, tmp_path / "plain")
    for number, options in enumerate(({}, {"workers": 2})):
        (found,) = run(packed, tmp_path / f"packed{number}", **options)
        assert Path(found + ".bin").read_bytes() == Path(plain + ".bin").read_bytes()
        done, left_out = capsys.readouterr().err.splitlines()[-2:]
        assert done.startswith("1/1 files")
        assert left_out == "documents without text left out: 1, of them 1 in records.JSONL.gz"
        (source,) = verify(found).sources["list"]
        assert source["sha256"] == hashlib.sha256(packed.read_bytes()).hexdigest()
        assert (source["bytes"], source["documents"]) == (packed.stat().st_size, 40)
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress("one, ü".encode()))
    assert read_back(run(tmp_path / "one.txt.gz", tmp_path / "text")[0]) == ["one, ü".encode()]
    line = b'{"text": "' + b"x" * 1000 + b'"}\n'
    packed.write_bytes(gzip.compress(line * 3 + b"{}\n" + line))
    with raises(DataError, f"byte offset {3 * len(line)}", "no object"):
        run(packed, tmp_path / "bad")
    packed.write_bytes(gzip.compress(line * 30)[:-9])
    with raises(DataError, packed, "cannot be unpacked"):
        run(packed, tmp_path / "bad", workers=2)
    packed.write_bytes(gzip.compress(b"", mtime=0))
    with raises(DataError, "got none of 0 documents"):
        run(packed, tmp_path / "bad")


def test_object_stores_are_refused(tmp_path):
    for inputs, output in ((["s3://bucket/texts"], "set"), ([str(tmp_path)], "msc://profile/set")):
        with raises(DataError, "://", "object store", "mount the bucket"):
            prepare(inputs, output)


def test_inputs_are_found_as_documented(texts, tmp_path, capsys):
    (texts / ".hidden.txt").write_text("no")
    (texts / "__pycache__").mkdir()
    (texts / "__pycache__" / "x.py").write_text("no")
    for name in ("a.jsonl.gz", "b.gz", "c"):
        (texts / name).write_text("words")
    find_sources([texts])
    said = f"{texts}: files left out: 1 .gz, 1 .png, 1 without a suffix (take some with --glob)"
    assert said in capsys.readouterr().err
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.txt").write_text("words")
    (texts / "linked").symlink_to(tmp_path / "elsewhere")
    names = [source.relative for source in find_sources([texts])]
    assert f"{texts}: links to folders left out: linked (" in capsys.readouterr().err
    assert names == sorted(names)
    assert len(names) == 15
    assert [s.relative for s in find_sources([texts], ["*.png"])] == ["picture.png"]
    assert [s.relative for s in find_sources([texts / "picture.png"])] == ["picture.png"]
    for inputs, globs, says in (
        ([tmp_path / "missing"], [], "missing: No such file"),
        ([""], [], "an INPUT is empty"),
        (["x" * 300], [], "x: File name too long"),
        ([texts], ["*.rst"], r"\*\.rst.*--glob"),
    ):
        with pytest.raises(DataError, match=says):
            find_sources(inputs, globs)
    (texts / "part1" / "gone.txt").symlink_to("nowhere.txt")
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        find_sources([texts])
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "text.txt")
    for given in (tmp_path / "in", tmp_path / "in" / "text.txt"):
        with pytest.raises(DataError, match=r"text\.txt is p[rwx-]+"):
            find_sources([given])


def test_one_file_found_twice_is_refused(texts):
    for more in (texts, texts / "part1"):
        with raises(DataError, code="duplicate"):
            find_sources([texts, more])
    for link in (os.link, os.symlink):
        link(texts / "part1" / "01.txt", texts / "twin.txt")
        with raises(DataError, code="duplicate"):
            find_sources([texts])
        (texts / "twin.txt").unlink()


@pytest.mark.parametrize("find", [find_sources, lambda _: find_stdlib_sources()])
def test_a_folder_that_cannot_be_listed_is_not_left_out(texts, monkeypatch, find):
    original = os.scandir

    def refuse(path):
        if Path(path).name in ("part1", "json"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(sources_module.os, "scandir", refuse)
    with pytest.raises(DataError, match=r"(part1|json): Permission denied"):
        find([texts])


def test_a_source_that_becomes_unreadable_or_changes_is_named(texts, tmp_path, monkeypatch):
    original = prepare_module.read_documents

    def read_and_touch(piece, *rest):
        yield from original(piece, *rest)
        os.utime(piece.source.path, ns=(0, 0))

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "read_documents", read_and_touch)
        with raises(DataError, texts / "empty.md", code="changed"):
            run(texts, tmp_path / "data")
    opened = open

    def refuse(path, *rest):
        if "texts" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"texts/.*: Permission denied"):
        run(texts, tmp_path / "data")


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    save_words(tmp_path / "hf", {f"w{n}": n for n in range(70_000)} | {"<eos>": 70_000}, eos_token="<eos>")
    (tmp_path / "a.txt").write_text("w69999 w3")
    (prefix,) = run(tmp_path / "a.txt", tmp_path / "data", tokenizer=str(tmp_path / "hf"))
    manifest = verify(prefix)
    assert (manifest.dtype, manifest.max_token_id, manifest.tokens) == ("int32", 70_000, 3)
    assert manifest.tokenizer["kind"] == "huggingface"
    assert np.fromfile(prefix + ".bin", dtype=np.int32).tolist() == [69_999, 3, 70_000]


def test_progress_names_the_rate_and_the_time_left(monkeypatch, capsys):
    """Of 6 MB, 2 in 20 s and 6 in 40 s."""
    clock = iter([0.0, 20.0, 20.0, 20.0, 25.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    sources = [SimpleNamespace(size=2e6), SimpleNamespace(size=4e6)]
    pieces = [SimpleNamespace(start=0, stop=stop) for stop in (2e6, 4e6)]
    results = [(piece, SimpleNamespace(sha256="0")) for piece in pieces]
    assert list(prepare_module._reported(results, sources)) == results
    assert capsys.readouterr().err.splitlines() == [
        "1/2 files  2.0/6.0 MB  0.1 MB/s  left 40 s",
        "2/2 files  6.0/6.0 MB  0.1 MB/s  left 0 s",
    ]


def test_the_standard_library_is_a_corpus(tmp_path):
    train, heldout = prepare_stdlib_corpus(str(tmp_path / "stdlib"))
    manifests = verify(train), verify(heldout)
    assert 6e6 < sum(m.text_bytes for m in manifests) < 14e6
    assert manifests[1].text_bytes > 200_000
    names = [{record["path"] for record in m.sources["list"]} for m in manifests]
    assert names[0].isdisjoint(names[1])
    assert "argparse.py" in names[0] | names[1]
    made = Path(train + ".bin").stat()
    assert prepare_stdlib_corpus(str(tmp_path / "stdlib")) == (train, heldout)  # stays
    assert Path(train + ".bin").stat() == made
    Path(heldout + ".bin").write_bytes(b"damaged")
    with raises(DataError, "--overwrite", code="exists"):
        prepare_stdlib_corpus(str(tmp_path / "stdlib"))


def test_the_corpus_holds_nothing_that_describes_one_build(tmp_path, monkeypatch):
    kept = ["argparse.py", "json/decoder.py", "logging/config.py", "lib2.py"]
    left_out = (
        "config-3.12-x86_64-linux-gnu/python-config.py _sysconfigdata__linux.py test/a.py json/tests/a.py "
        "encodings/utf_8.py site-packages/numpy/core.py json/__pycache__/a.py notes.txt .venv/a.py"
    )
    for path in (tmp_path / name for name in (*kept, *left_out.split())):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/one/machine/bin/python3")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [source.relative for source in find_stdlib_sources()] == sorted(kept)
