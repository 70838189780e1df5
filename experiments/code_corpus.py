"""Writes a corpus of C and C++: sources of source distributions of pinned versions, deduplicated, split by project.

    pip install pypi-simple
    python -m experiments.code_corpus build/code

``code_corpus.csv`` names the projects, their files with digests, and whether they are held out. Makes ``train.jsonl`` and
``heldout.jsonl`` (``text`` and ``path``) in the folder; downloads stay in ``sdists`` there. A held-out file that is also in
a training project is left out.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.util.files import sha256_of

MANIFEST = Path(__file__).with_suffix(".csv")
SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inl", ".ipp", ".tpp")
LARGEST = 1 << 18
"""Bytes of a file; larger ones are tables and generated code."""


def fetch(row: dict[str, str], folder: Path) -> Path:
    """Return the source distribution of ``row``, downloaded if it is not in ``folder``.

    Raises:
        DataError: its digest is not the manifest's, or the index has no such file.
    """
    path = folder / row["file"]
    if not path.exists():
        from pypi_simple import PyPISimple

        with PyPISimple() as client:
            packages: Sequence[Any] = client.get_project_page(row["project"]).packages
            chosen = [package for package in packages if package.filename == row["file"]]
            if not chosen:
                raise DataError(
                    f"the index has no {row['file']}; expected it among the {len(packages)} files of {row['project']}"
                )
            client.download_package(chosen[0], path)
    if (digest := sha256_of(path)) != row["sha256"]:
        raise DataError(f"{path} has SHA-256 {digest}, expected {row['sha256']}; remove it to download it again")
    return path


def sources(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each C or C++ file of an archive, in its order."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.lower().endswith(SUFFIXES):
                    yield info.filename, archive.read(info)
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and member.name.lower().endswith(SUFFIXES):
                content = archive.extractfile(member)
                assert content is not None
                yield member.name, content.read()


def build(rows: Sequence[dict[str, str]], folder: Path) -> dict[str, dict[str, int]]:
    """Write the two parts; return the number of files and bytes of each, and of those left out by reason."""
    (folder / "sdists").mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    count: dict[str, dict[str, int]] = {}
    for part in ("train", "heldout"):
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as output:
            for row in (row for row in rows if row["part"] == part):
                for name, content in sources(fetch(row, folder / "sdists")):
                    category, text = part, content.decode("utf-8", errors="replace")
                    key = hashlib.sha256(b"".join(content.split())).digest()
                    if len(content) > LARGEST:
                        category = "too large"
                    elif "\ufffd" in text or "\0" in text:
                        category = "no UTF-8"
                    elif key in seen:
                        category = "seen before"
                    else:
                        output.write(json.dumps({"text": text, "path": name}) + "\n")
                        seen.add(key)
                    total = count.setdefault(category, {"files": 0, "bytes": 0})
                    total["files"] += 1
                    total["bytes"] += len(content)
    return count


def main() -> None:
    """Build the corpus of ``code_corpus.csv``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    with MANIFEST.open(newline="") as file:
        count = build(list(csv.DictReader(file)), parser.parse_args().folder)
    for category, total in count.items():
        print(f"{category:12} {total['files']:7} files  {total['bytes'] / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
