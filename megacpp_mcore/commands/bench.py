"""``megacpp-mcore bench list | run``: every benchmark of an op or a layer behind one command; torch only where one is run."""

from __future__ import annotations

import argparse
import os
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from megacpp_mcore.bench import catalog, csv_table
from megacpp_mcore.bench.catalog import FULL, KINDS, SIZES, Benchmark, Options
from megacpp_mcore.errors import BenchmarkError, MegacppError
from megacpp_mcore.util import flags, te_imports


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser("bench", help="benchmarks of every op and layer, with peers, floors and parity")
    parser.set_defaults(run=run)
    inner = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    listing = inner.add_parser("list", help="the benchmarks, with the sizes of each")
    listing.add_argument("--size", choices=SIZES, default=FULL, help="which sizes to show (default: full)")
    runner = inner.add_parser("run", help="check, time, and write rows")
    runner.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks, or kinds: {', '.join(KINDS)}")
    runner.add_argument("--all", action="store_true", help="run every benchmark")
    runner.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    runner.add_argument("--size", choices=SIZES, default=FULL, help="full: the width of nam56r; tiny: for a dry run")
    sizes = "other sizes of one benchmark (see `bench list`)"
    runner.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=N", help=sizes)
    runner.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on cuda, float32 on cpu")
    runner.add_argument("--output", type=Path, metavar="FILE", help="add the rows to this CSV file")
    runner.add_argument("--against", type=Path, metavar="FILE", help="fail where a row is slower than in this CSV file")
    slowdown = "the slowdown that is not a regression (default: 0.1)"
    runner.add_argument("--tolerance", type=flags.not_negative, default=0.1, help=slowdown)
    runner.add_argument("--without", nargs="+", default=[], metavar="PEER", help="skip peers whose names contain this")
    runner.add_argument("--seconds", type=flags.not_negative, default=1.0, help="per figure (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Run ``bench``; return 1 if parity failed or something got slower."""
    if args.bench_command == "list":
        print(listed(args.size))
        return 0
    chosen = catalog.select(args.names, all_of_them=args.all)
    options = _options(chosen, args)
    import torch

    os.environ |= te_imports.cudnn_home(os.environ)

    from megacpp_mcore.bench import measure

    if args.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("no CUDA device found; add --device cpu --size tiny for a dry run")
    say = partial(print, flush=True)
    before = csv_table.read(args.against) if args.against else []
    output = csv_table.Table(args.output) if args.output else None
    rows, failures = [], []
    with measure.one_process(args.device):
        for benchmark in chosen:
            try:
                measured = measure.run(benchmark, options[benchmark.name], say)
            except MegacppError:
                raise
            except Exception as error:  # the other benchmarks of a long run still count
                traceback.print_exc()
                failures.append(f"{benchmark.name}: failed to run: {type(error).__name__}: {error}")
                continue
            rows += measured.rows
            failures += measured.failures
            if output is not None:
                output.append(*measured.rows)
    named = {row["variant"] for row in rows}
    failures += [
        f"--without {word}: unknown variant; choose from {', '.join(sorted(named))}"
        for word in args.without
        if not any(word in variant for variant in named)
    ]
    for line in failures:
        say(line)
    if args.against:  # last, as it may refuse
        compared = csv_table.compare(before, rows, args.tolerance)
        timed = sum(row["ms"] != "" for row in rows)
        head = f"against {args.against}, {compared.compared} rows of {timed} that have a time:"
        say("\n".join(["", head, *compared.lines, *compared.slower]))
        failures += compared.slower
    return int(bool(failures))


def listed(size: str) -> str:
    """List every benchmark: name, kind, what it covers, and sizes."""
    rows = [(b.name, b.kind, b.title, csv_table.shape_text(b.shapes[size])) for b in catalog.BENCHMARKS.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows)


def _options(chosen: list[Benchmark], args: argparse.Namespace) -> dict[str, Options]:
    """Make the options of each benchmark, all checked before the first one runs."""
    if len(chosen) > 1 and args.set:
        raise BenchmarkError(f"--set is for one benchmark; {len(chosen)} are named")
    changes = {}
    for word in args.set:
        name, _, value = word.partition("=")
        if not value.isdecimal():
            raise BenchmarkError(f"--set takes KEY=N with a whole number, found {word!r}")
        changes[name] = int(value)
    return {
        benchmark.name: Options(
            device=args.device,
            dtype=args.dtype or ("bfloat16" if args.device == "cuda" else "float32"),
            shape=benchmark.shape(args.size, changes),
            seconds=args.seconds,
            without=tuple(args.without),
        )
        for benchmark in chosen
    }
