"""Recall over long rows: synthetic rows of needles and copies, and how often a trained model repeats them, by distance.

``experiments/recall.yaml`` has the commands. A row is a document as long as the model's, so that Megatron's samples are these
rows. A needle is a key of its own and a value, which occur :data:`TIMES` times: from the second time on the key queries the
value. A copy is a marker and :data:`BLOCK` tokens; the marker occurs once more, followed by the same block. One repeated
phrase fills the other half of a row. Distances are drawn log-uniformly. (Multi-query associative recall, arXiv 2312.04927,
over the distances and with the noise of RULER, arXiv 2404.06654.) An answer counts if each of its tokens is the likeliest
after those before, as in greedy decoding. From random weights a model of 12 layers learnt no recall from such rows in 98
million tokens. Drills, rows of few needles again and again, are a denser signal; they are for training alone.

Shape legend: L tokens of a row, N items or needles, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random as Draws
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.train import PACKAGES
from megacpp_mcore.bench.csv_table import Table
from megacpp_mcore.bench.measure import device_name, versions
from megacpp_mcore.data.index import TOKEN_DTYPES
from megacpp_mcore.data.manifest import adopt
from megacpp_mcore.util import flags

EOD, FILLERS = 0, 32
"""Ids 1 to FILLERS - 1 are the phrase; keys and markers follow up to half of the vocabulary, and values are the rest."""
NEEDLE, COPY, BLOCK, TIMES = "needle", "copy", 16, 4
DRILLED = 16
"""A drill has fewer needles than these."""
NEAREST = 16
"""Minimum distance between a query and its answer, in tokens."""
EDGES = (NEAREST, 256, 1024, 4096, 8192, 16384, 32768)
"""Bucket edges of the distances; windows of ``nam56r_long`` see up to 4095."""
COLUMNS = ("arm", "steps", "task", "from", "to", "items", "right", "device", *PACKAGES, "commit")
SCRIPT = Path(__file__).with_name("recall_answers.py")


@dataclass(frozen=True)
class Item:
    """A query: its token is at ``query``; its answer of ``answer`` tokens last occurred ``distance`` tokens earlier."""

    task: str
    query: int
    answer: int
    distance: int


def row(length: int, vocabulary: int, *seed: int) -> tuple[NDArray[np.uint16], list[Item]]:
    """Draw a row [L] and its items, always the same for the same seed.

    Raises:
        ValueError: the vocabulary has too few keys for the length, or the row is too short for a distance.
    """
    needles, copies, keys = length // 32, length // 128, vocabulary // 2 - FILLERS
    if needles + copies > keys or not 16 * NEAREST <= length <= EDGES[-1] or vocabulary > 2**16:
        raise ValueError(
            f"a row of {length} tokens with {needles + copies} keys, of a vocabulary of {vocabulary} with {max(keys, 0)}; "
            f"expected {16 * NEAREST} to {EDGES[-1]} tokens, as many keys, and at most {2**16} in the vocabulary"
        )
    random = np.random.default_rng(seed)
    tokens_L = (1 + np.arange(length) % (FILLERS - 1)).astype(np.uint16)
    tokens_L[-1] = EOD
    taken_L, draw = bytearray(length - 1), Draws(str(seed)).random  # faster than NumPy's, one at a time
    names = FILLERS + random.permutation(keys)[: needles + copies]
    items: list[Item] = []
    # Copies first, while there is room for them.
    for number, name in enumerate(names):
        task, size, times = (COPY, BLOCK + 1, 2) if number < copies else (NEEDLE, 2, TIMES)
        starts = [int(draw() * (length - size))]
        while len(starts) < times or any(taken_L[starts[0] : starts[0] + size]):
            start = starts[-1] + int(NEAREST * (length / NEAREST) ** draw())
            if any(taken_L[starts[0] : starts[0] + size]) or start + size >= length or draw() < 0.05:
                starts = [int(draw() * (length - size))]  # start over where nothing fits behind
            elif start - starts[-1] >= size and not any(taken_L[start : start + size]):
                starts.append(start)
        text = [name, *random.integers(vocabulary // 2, vocabulary, size - 1)]
        for start in starts:
            tokens_L[start : start + size], taken_L[start : start + size] = text, b"\1" * size
        items += [Item(task, at, size - 1, at - before) for before, at in itertools.pairwise(starts)]
    return tokens_L, items


def drill(length: int, vocabulary: int, *seed: int) -> NDArray[np.uint16]:
    """Draw a row [L] of 2 or more needles and nothing else, fewer than :data:`DRILLED`, in random order; one per seed."""
    random = np.random.default_rng(seed)
    needles = int(2 * (DRILLED / 2) ** random.random())
    keys_N = FILLERS + random.permutation(vocabulary // 2 - FILLERS)[:needles]
    needles_N2 = np.stack([keys_N, random.integers(vocabulary // 2, vocabulary, needles)], axis=1)
    tokens_L = needles_N2[random.integers(needles, size=length // 2 + 1)].ravel()[:length].astype(np.uint16)
    tokens_L[-1] = EOD
    return tokens_L


def write(prefix: Path, length: int, vocabulary: int, rows: int, drills: int, seed: int) -> None:
    """Write ``drills`` drills, then ``rows`` rows as Megatron's indexed dataset, with the package's manifest."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder: Any = IndexedDatasetBuilder(f"{prefix}.bin", dtype=TOKEN_DTYPES[8])
    with ProcessPoolExecutor() as pool:
        columns = [itertools.repeat(argument) for argument in (length, vocabulary, seed)]
        drilled = pool.map(drill, *columns, range(drills), chunksize=8)
        drawn = pool.map(row, *columns, range(rows), chunksize=8)
        for tokens_L in itertools.chain(drilled, (tokens_L for tokens_L, _ in drawn)):
            builder.add_item(torch.from_numpy(tokens_L.astype(np.int64)))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    print(adopt(str(prefix), vocab_size=vocabulary, eod_id=EOD).tokens, "tokens")


def score(runs: Path, rows: int, seed: int, device: str, output: Path) -> int:
    """Add the accuracy of every run in a folder of :mod:`experiments.train` to the table ``output``; return 1 if one fails."""
    table, failed = Table(output, COLUMNS), 0
    launch = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "launch", "--no-observe", "--device", device, "--"]
    recall_options = ["--recall-rows", str(rows), "--recall-seed", str(seed)]
    for folder in sorted(arguments_file.parent for arguments_file in runs.glob("*/arguments.json")):
        words: list[str] = json.loads((folder / "arguments.json").read_text())
        saved = flags.read(words)["--save"][0]
        answers, log = folder / "answers.json", folder / "answers.log"
        loaded = ["--load", saved, "--no-load-optim", "--no-load-rng", "--skip-train"]
        command = [*launch, str(SCRIPT), *words, *loaded, *recall_options, "--recall-output", str(answers)]
        environment = {**os.environ, "MEGACPP_CONFIG": str(folder / "megacpp.json")}
        with log.open("w") as sink:
            process = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT, check=False, env=environment)
        if process.returncode:
            print(f"{folder.name}: status {process.returncode}; see {log}")
            failed = 1
            continue
        answered = json.loads(answers.read_text())
        of_run = {"arm": Path(saved).name, "steps": answered["step"], "device": device_name(device)}
        for counts in answered["counts"]:
            line = of_run | dict(zip(COLUMNS[2:7], counts, strict=True)) | versions(*PACKAGES[2:])
            table.append(line)
            print("  ".join(f"{name} {line[name]}" for name in COLUMNS[:7]))
    return failed


def counted(items: Sequence[Item], is_right: Sequence[bool]) -> list[tuple[str, int, int, int, float]]:
    """Return, by task and distance from and to (exclusive), the number of items and the share that is right."""
    total: Counter[tuple[str, int, int]] = Counter()
    right: Counter[tuple[str, int, int]] = Counter()
    for item, is_good in zip(items, is_right, strict=True):
        upper = next(edge for edge in EDGES[1:] if item.distance < edge)
        bucket = item.task, EDGES[EDGES.index(upper) - 1], upper
        total[bucket] += 1
        right[bucket] += is_good
    return [(*bucket, count, round(right[bucket] / count, 4)) for bucket, count in sorted(total.items())]


def main(argv: Sequence[str] | None = None) -> int:
    """Write rows, or score runs; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    actions = parser.add_subparsers(dest="action", required=True)
    data = actions.add_parser("data", help="write a dataset")
    data.add_argument("prefix", type=Path, help="path of the dataset without suffix")
    data.add_argument("--length", type=flags.positive, required=True, help="tokens of a row, the model's seq_length")
    data.add_argument("--vocab-size", type=flags.positive, required=True, help="of the model")
    data.add_argument("--drills", type=flags.positive, default=0, help="how many drills to add, which are easy to learn from")
    scored = actions.add_parser("score", help="count the answers of every run that experiments.train left in a folder")
    scored.add_argument("runs", type=Path, help="its --folder")
    scored.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    scored.add_argument("--output", type=Path, default=Path("build/recall.csv"))
    for subparser in (data, scored):
        subparser.add_argument("--rows", type=flags.positive, required=True, help="how many")
        subparser.add_argument("--seed", type=int, required=True, help="of the rows; use another one for scoring")
    args = parser.parse_args(argv)
    if args.action == "score":
        return score(args.runs, args.rows, args.seed, args.device, args.output)
    write(args.prefix, args.length, args.vocab_size, args.rows, args.drills, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
