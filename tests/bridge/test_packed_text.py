"""Parquet and Zstandard for `data prepare`, in the environment that has pyarrow; the same text gives the same dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bridge.processes import run

pytestmark = pytest.mark.bridge

WRITE = """
import json, sys
import pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
folder = Path(sys.argv[1])
texts = [f"text {n}: \u00fc" + "x" * (n % 50) for n in range(900)]
lines = "".join(json.dumps({"id": n, "code": text}) + "\\n" for n, text in enumerate(texts)).encode()
half = lines.index(b"\\n", len(lines) // 2) + 1
def pack(text):
    written = pa.BufferOutputStream()
    with pa.CompressedOutputStream(written, "zstd") as stream:
        stream.write(text)
    return written.getvalue().to_pybytes()
(folder / "plain.jsonl").write_bytes(lines)
(folder / "packed.jsonl.zst").write_bytes(pack(lines[:half]) + pack(lines[half:]))
(folder / "cut.jsonl.zst").write_bytes(pack(lines)[:-3])
pq.write_table(pa.table({"id": list(range(900)), "code": texts}), folder / "table.parquet", row_group_size=250)
(folder / "cut.parquet").write_bytes((folder / "table.parquet").read_bytes()[:-3])
texts[400] = None
pq.write_table(pa.table({"code": texts}), folder / "holes.parquet", row_group_size=250)
_, ends, characters = pa.array([b"a", b"b", b"c", b"d\\xff"]).buffers()
pq.write_table(pa.table({"code": pa.StringArray.from_buffers(4, ends, characters)}), folder / "bytes.parquet")
"""


@pytest.fixture(scope="module")
def folder(bridge_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed")
    (made / "write.py").write_text(WRITE)
    run(bridge_python, "write", str(made), folder=made)
    return made


@pytest.mark.parametrize("name", ["packed.jsonl.zst", "table.parquet"])
def test_it_gives_the_dataset_of_plain_lines(bridge_python: Path, folder: Path, name: str) -> None:
    made = {}
    for source, workers in (("plain.jsonl", "1"), (name, "2")):
        prefix = folder / f"{source}_for_{name}"
        words = ["--output", str(prefix), "--json-key", "code", "--split", "a=0.6,b=0.4", "--workers", workers]
        done = run(bridge_python, "megacpp_mcore", "data", "prepare", str(folder / source), *words)
        assert "1/1 files" in done.stderr
        made[source] = [Path(f"{prefix}_{side}.{kind}").read_bytes() for side in "ab" for kind in ("bin", "idx")]
    assert made["plain.jsonl"] == made[name]


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("cut.jsonl.zst", "code", ["cut.jsonl.zst cannot be unpacked: Truncated", "restore it from a copy"]),
        ("cut.parquet", "code", ["cut.parquet cannot be unpacked", "restore it from a copy"]),
        ("table.parquet", "text", ["no column 'text'; found id, code: --json-key"]),
        ("holes.parquet", "code", ["holes.parquet, row 400: the value of 'code' is a NoneType"]),
        ("bytes.parquet", "code", ["bytes.parquet, row 3: byte 1 of its text is not UTF-8"]),
    ],
)
def test_what_cannot_be_read_is_named(
    bridge_python: Path, folder: Path, name: str, key: str, values: list[str]
) -> None:
    words = ["data", "prepare", str(folder / name), "--output", str(folder / "none"), "--json-key", key]
    done = run(bridge_python, "megacpp_mcore", *words, status=2)
    assert all(value in done.stderr for value in values), done.stderr
    assert not list(folder.glob("none*"))
