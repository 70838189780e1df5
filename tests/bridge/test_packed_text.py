"""Parquet and Zstandard for `data prepare`, in the environment that has pyarrow; the same text gives the same dataset."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.bridge.processes import CLI, outcomes, run

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


PACKED = ["packed.jsonl.zst", "table.parquet"]
REFUSED = [
    ("cut.jsonl.zst", "code", ["cut.jsonl.zst cannot be unpacked: Truncated", "restore it from a copy"]),
    ("cut.parquet", "code", ["cut.parquet cannot be unpacked", "restore it from a copy"]),
    ("table.parquet", "text", ["no column 'text'; found id, code: --json-key"]),
    ("holes.parquet", "code", ["holes.parquet, row 400: the value of 'code' is a NoneType"]),
    ("bytes.parquet", "code", ["bytes.parquet, row 3: byte 1 of its text is not UTF-8"]),
]


def test_it_gives_the_dataset_of_plain_lines_and_what_cannot_be_read_is_named(bridge_python: Path, tmp_path: Path) -> None:
    (tmp_path / "write.py").write_text(WRITE)
    run(bridge_python, "write", str(tmp_path), folder=tmp_path)
    split = ["--json-key", "code", "--split", "a=0.6,b=0.4", "--workers"]
    plain, *packed = (
        ["data", "prepare", tmp_path / name, "--output", tmp_path / f"of {name}", *split, workers]
        for name, workers in (("plain.jsonl", 1), *((name, 2) for name in PACKED))
    )
    refused = [
        ["data", "prepare", tmp_path / name, "--output", tmp_path / "none", "--json-key", key] for name, key, _ in REFUSED
    ]
    answers = outcomes(bridge_python, CLI, [plain, *packed, *refused])
    for status, output, _ in answers[: -len(REFUSED)]:
        assert status == 0, output
        assert "1/1 files" in output
    for name, side, kind in itertools.product(PACKED, "ab", ("bin", "idx")):
        of_plain, of_packed = (tmp_path / f"of {source}_{side}.{kind}" for source in ("plain.jsonl", name))
        assert of_packed.read_bytes() == of_plain.read_bytes()
    for (_, _, values), (status, output, _) in zip(REFUSED, answers[-len(REFUSED) :], strict=True):
        assert status == 2
        assert all(value in output for value in values), output
    assert not list(tmp_path.glob("none*"))
