"""Write the tables of figures in README.md and docs/ from the rows in experiments/results.

    python -m experiments.figures

A table goes between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; :data:`TABLES` maps its cells to rows.
A figure without a row cannot be written, and a test fails if a page's tables differ from the rows.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from experiments import lengths
from experiments import scaling as paper
from megacpp_mcore.model.run import BUCKET_ELEMENTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?<=<!-- figures: )(\w+) -->\n.*?(?=<!-- end of figures -->)", re.DOTALL)
BOTH = "forward+backward"
FLASH4 = "bench_flash4_h200"
"""The run with FlashAttention-4."""
BYTES_A_TOKEN = 24_546_564 / 6_444_168
"""Of the held-out text of ``experiments/twins.yaml``, by its manifest."""
TWINS = {
    "nam56r": ("NAM56R", 237_593_408),
    "dense": ("stock GPTModel, dense", 139_466_496),
    "mla moe": ("stock GPTModel, MLA and experts", 286_870_272),
    "mamba2 moe": ("stock HybridModel, Mamba-2, attention and experts", 293_679_824),
    "full attention": ("NAM56R without DSA", 237_183_552),
    "without R": ("NAM56R without R", 250_758_176),
    "without M": ("NAM56R without M", 315_428_624),
    "without E": ("NAM56R without E", 132_329_504),
    "without A": ("NAM56R without A", 223_583_040),
    "windows": ("NAM56R, windows in place of DSA", 237_183_552),
    "prediction": ("NAM56R with MTP", 244_429_504),
}
"""For each arm of that file, the model and its parameters, as Megatron counts them."""
SHARED = ("full attention", "without R", "windows", "prediction")
"""Arms of that file whose only run shared its card with another: their speed says nothing."""

Row = Mapping[str, str]
Line = Sequence[str]


@functools.cache
def rows(file: str) -> tuple[Row, ...]:
    """Read ``experiments/results/FILE.csv``."""
    with (ROOT / "experiments" / "results" / f"{file}.csv").open(newline="", encoding="utf-8") as text:
        return tuple(csv.DictReader(text))


def select(file: str, shape: str = "", **values: str) -> list[Row]:
    """Return the rows of a file with these values and the words of ``shape``, in the file's order."""

    def fits(row: Row) -> bool:
        words = set(shape.split()) <= set(row.get("shape", "").split())
        return words and all(row[name] == value for name, value in values.items())

    return [row for row in rows(file) if fits(row)]


def one(file: str, shape: str = "", **values: str) -> Row:
    """Return the single row that matches."""
    matches = select(file, shape, **values)
    if len(matches) != 1:
        raise LookupError(f"{file}.csv has {len(matches)} rows with {values} {shape}; expected one")
    return matches[0]


def number(value: float | str, per: float = 1.0) -> str:
    """Round a figure to two or three digits, and thousands to hundreds."""
    scaled = float(value) / per
    if scaled >= 10_000:
        return f"{round(scaled, -2):,.0f}"
    return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}"


def op(benchmark: str, variant: str, words: str = "", work: str = BOTH, *, file: str = "bench_h200") -> Row:
    """Return the row of a benchmark's variant, with 8192 tokens on an H200."""
    rows = "B=1 S=8192" if benchmark == "mla_packed" else "B=2 S=4096"
    return one(file, f"{rows} {words}", benchmark=benchmark, variant=variant, work=work)


def gigabytes(row: Row) -> str:
    """Format a row's peak allocated memory."""
    return number(float(row.get("peak_bytes") or float(row["max_allocated_mib"]) * 2**20), 1e9)


def ops() -> Iterator[Line]:
    """Ops and the E layer compared with stock or the best peer."""
    e_layer = next(row["variant"] for row in rows("bench_h200") if row["variant"].startswith("ours (experts"))
    te, unfused, fused = "Transformer Engine", "Megatron, unfused", "Megatron, fused"
    experts = "Megatron, Transformer Engine"
    table = (
        ("MLA core", te, "mla", "stock Transformer Engine", "sdpa", "", BOTH),
        ("MLA core by FlashAttention-4", "none[^flash4]", "mla", "", "flash4", "", BOTH),
        ("sparse MLA", unfused, "sparse_mla", "stock unfused", "triton", "heads=56", BOTH),
        ("DSA's indexer: selection", "Megatron", "indexer", "stock", "triton", "", "forward"),
        ("DSA's indexer: gradient", "none[^gradient]", "indexer_grad", "", "triton", "", "gradient"),
        ("Mamba-3 MIMO of rank 4", "mamba-ssm[^mimo]", "mamba3", "mamba-ssm MIMO", "triton", "state=64", BOTH),
        ("Mamba-3 SISO", "mamba-ssm[^siso]", "mamba3_siso", "mamba-ssm SISO, 4 warps", "triton", "", BOTH),
        ("M²RNN", "xma[^xma]", "m2rnn", "xma's recurrence (Triton) in the reference", "triton", "", BOTH),
        ("routed experts", experts, "routed_mlp", "stock TEGroupedMLP", "triton", "", BOTH),
        ("routed experts in FP8[^fp8]", experts, "routed_mlp", "stock TEGroupedMLP",
         "triton_fp8, weights kept quantised", "", BOTH),
        ("E layer", experts, "layer_e", "stock MoELayer", e_layer, "", BOTH),
        ("output layer and loss[^loss]", fused, "linear_cross_entropy", "stock, fused cross-entropy",
         "known weights, main_grad", "", BOTH),
    )  # fmt: skip
    yield "", "stock or best peer", "ms", "GB", "here, ms", "here, GB", "plain PyTorch, ms"
    for label, peer, benchmark, peer_variant, ours, words, work in table:
        best = op(benchmark, peer_variant, words, work) if peer_variant else None
        run = FLASH4 if ours == "flash4" else "bench_h200"
        here = op(benchmark, ours, words, work, file=run)
        plain = number(op(benchmark, "reference", words, work, file=run)["ms"]) if benchmark != "layer_e" else ""
        peer_cells = (number(best["ms"]), gigabytes(best)) if best else ("", "")
        yield label, peer, *peer_cells, f"**{number(here['ms'])}**", gigabytes(here), plain


def models() -> Iterator[Line]:
    """Whole models as their recipes train them, on the slowest and the fastest machine that was measured."""
    graphs = {"nam56r_quarter": ("graphs", "our norms")}
    yield "", "tokens/s, slowest machine", "tokens/s, fastest", "MFU %, slowest", "MFU %, fastest", "GB a GPU"
    for label, model, files, arms in (
        ("`nam56r` on one H200", "nam56r", ("gpus_h200", "nam56r_h200"), ("micro-batch 2", "bf16")),
        ("the same, micro-batches of four", "nam56r", ("nam56r_h200",), ("micro-batch 4",)),
        (
            "16 a step, moments in bf16, [quack and FlashAttention-4](docs/transformer-engine.md#kernels-of-other-packages)",
            "nam56r",
            ("nam56r_h200",),
            ("other packages, 16 micro-batches of 4, moments in bf16",),
        ),
        ("two H200s", "nam56r", ("gpus_h200",), ("two micro-batch 2",)),
        ("four H200s", "nam56r", ("gpus_h200",), ("four micro-batch 2",)),
        ("two H100s", "nam56r", ("gpus_h100",), ("two",)),
        ("four H100s", "nam56r", ("gpus_h100",), ("four",)),
        ("one H200, FP8[^fp8]", "nam56r", ("nam56r_h200",), ("fp8 projections and MTP",)),
        (
            "the same, micro-batches of four, [moments in bf16](docs/recipes.md#moments-in-bf16)",
            "nam56r",
            ("nam56r_h200",),
            ("fp8 projections and MTP, micro-batch 4, moments in bf16",),
        ),
        ("four H200s, experts and scopes in FP8[^fp8]", "nam56r", ("gpus_h200",), ("four fp8",)),
        ("`nam56r_quarter` on one H200", "nam56r_quarter", ("quarter_h200",), graphs["nam56r_quarter"]),
        ("one H100", "nam56r_quarter", ("quarter_h100",), ("graphs",)),
    ):
        runs = [row for file in files for arm in arms for row in select(file, arm=arm, model=model)]
        runs.sort(key=lambda row: int(row["tokens_per_s"]))
        ends = (runs[0], runs[-1])
        mfu = [number(float(row["mfu"]) * 100) if row["mfu"] else "" for row in ends]
        yield label, *(number(row["tokens_per_s"]) for row in ends), *mfu, max(map(gigabytes, runs), key=float)


def layouts() -> Iterator[Line]:
    """Layouts of the 52 layers."""
    yield "layout", "GPUs", "micro-batches of", "CUDA graphs", "ms a step", "tokens/s a GPU", "GB a GPU", "commit"
    for label, gpus, arm, commit, micro, graphs in (
        ("one GPU", 1, "micro-batch 2", "cbb992c", 2, "yes"),
        ("replicas", 2, "two micro-batch 2", "b8e159e", 2, "yes"),
        ("replicas", 4, "four micro-batch 2", "cbb992c", 2, "yes"),
        ("`--pipeline 2 --virtual 2`[^stages]", 2, "pipeline 2x2 graphs", "8a18ac02", 2, "yes"),
        ("the same", 2, "pipeline 2x2", "b05c876", 2, "no"),
        ("the same, 13 layers a part", 2, "pipeline 2x2", "0428cd0", 2, "no"),
        ("the first of these, 32 sequences a step", 2, "pipeline 2x2 graphs, 32 sequences", "8a18ac02", 2, "yes"),
        ("`--expert 2`", 2, "expert 2 micro-batch 2", "2e1efacd", 2, "yes"),
        ("`--expert 4`[^four]", 4, "expert 4", "f039228", 1, "yes"),
        ("`--tensor 2 --sequence-parallel`", 2, "tensor 2 micro-batch 2", "3c8a5521", 2, "yes"),
        ("`--tensor 2 --expert 2 --sequence-parallel`[^four]", 4, "tensor 2 expert 2", "f039228", 1, "yes"),
        ("one GPU", 1, "one", "da086d0", 1, "yes"),
    ):
        row = one("gpus_h200", arm=arm, commit=commit)
        speed = number(row["step_ms"]), number(row["tokens_per_s"], gpus), gigabytes(row)
        yield label, str(gpus), str(micro), graphs, *speed, f"`{commit}`"


def shares_of_one() -> dict[tuple[int, int], list[float]]:
    """Return, by GPUs and ``--ddp-bucket-size``, every row's speed per GPU as a share of one GPU's at the same commit."""
    shares: dict[tuple[int, int], list[float]] = {}
    for gpus, arm in ((2, "two micro-batch 2"), (2, "two 120M"), (4, "four micro-batch 2")):
        for row in select("gpus_h200", arm=arm):
            is_megatrons = arm != "two 120M" and row["commit"] in ("bff49d1", "0428cd0")  # before BUCKET_ELEMENTS
            case = gpus, paper.MEGATRONS_BUCKET if is_megatrons else BUCKET_ELEMENTS
            for single in select("gpus_h200", arm="micro-batch 2", commit=row["commit"]):
                shares.setdefault(case, []).append(float(single["step_ms"]) / float(row["step_ms"]))
    return shares


def scaling() -> Iterator[Line]:
    """Replicas on more GPUs than were measured, by :mod:`experiments.scaling`."""
    yield (
        "GPUs", "sequences a GPU", "buckets", "reduction, ms", "gathering, ms", "not hidden, ms", "slowest card, %",
        "% of one GPU's speed", "measured, %", "MFU %",
    )  # fmt: skip
    row, measured = one("gpus_h200", arm="micro-batch 2", commit="cbb992c"), shares_of_one()
    for case in paper.TABLE:
        single_ms = float(row["step_ms"])
        share = single_ms * case.sequences / 8 / case.step(single_ms)
        shares = measured.get((case.gpus, case.bucket or BUCKET_ELEMENTS), ())
        seen = " and ".join(f"{100 * measured_share:.1f}" for measured_share in shares)
        label = f"{case.gpus} in {case.instances} instances" if case.instances > 1 else str(case.gpus)
        comm = (number(figure) for figure in (case.buckets, case.reduction, case.gathering, case.exposed))
        slowest, share_, mfu = (f"{100 * part:.1f}" for part in (case.waiting, share, share * float(row["mfu"])))
        yield label, str(case.sequences), *comm, slowest, share_, seen, mfu


def compiled() -> Iterator[Line]:
    """CUDA graphs, and recompute by family."""
    yield "", "ms a step", "tokens/s", "first step after, s", "GB", "commit"
    for label, model, arm, commit in (
        ("`nam56r_quarter`", "nam56r_quarter", "auto", "e87fb55"),
        ("`nam56r_quarter`, CUDA graphs", "nam56r_quarter", "graphs", "e87fb55"),
        ("`nam56r_quarter`, the host slower", "nam56r_quarter", "auto", "15fd72a"),
        ("`nam56r_quarter`, the host slower, CUDA graphs", "nam56r_quarter", "graphs", "15fd72a"),
    ):
        row = one("quarter_h200", model=model, arm=arm, commit=commit)
        yield label, number(row["step_ms"]), number(row["tokens_per_s"]), "", gigabytes(row), f"`{row['commit']}`"
    for label, arm in (("`nam56r`", "no graphs"), ("`nam56r`, CUDA graphs", "bf16")):
        row = one("nam56r_h200", arm=arm, commit="cbb992c")
        yield label, number(row["step_ms"]), number(row["tokens_per_s"]), "", gigabytes(row), f"`{row['commit']}`"
    names = {"none": "", "a": ", `recompute: [a]`", "m": ", `recompute: [m]`", "experts": ", `recompute: [experts]`"}
    for row in rows("recompute_h200"):
        if row["recompute"] in names and row["tax"] == "none":
            speed = number(row["median_step_ms"]), row["tokens_per_s"], number(row["first_step_s"])
            yield f"reference ops, 13 layers{names[row['recompute']]}", *speed, gigabytes(row), f"`{row['commit']}`"


def fp8() -> Iterator[Line]:
    """Routed experts, and the 52 layers, in FP8."""
    yield "on one H200", "CUDA graphs", "ms", "tokens/s"
    for variant in ("triton_fp8", "triton_fp8, weights kept quantised", "triton_fp8, dW into main_grad", "triton",
                    "triton, dW into main_grad", "quack"):  # fmt: skip
        yield f"routed experts, 32,768 rows, `{variant}`", "", number(op("routed_mlp", variant)["ms"]), ""
    for label, arm, graphs in (
        ("bf16", "bf16", "yes"),
        ("`routed_mlp: triton_fp8`", "fp8 experts", "yes"),
        ("scopes of A, M and shared experts, `block`", "fp8 scopes", "yes"),
        ("both", "fp8 experts and scopes", "yes"),
        ("both, without A", "fp8 experts, M and shared experts", "yes"),
        ("both, scopes `current`", "fp8 experts and current scopes", "yes"),
        ("bf16", "no graphs", "no"),
        ("`bf16_te_fp8_experts`", "fp8 experts by Transformer Engine", "no"),
    ):
        row = one("nam56r_h200", arm=arm, commit="cbb992c")
        yield f"52 layers, {label}", graphs, number(row["step_ms"]), number(row["tokens_per_s"])
    for machine, commit, label, arm in (
        ("a second", "02d1adf3", "experts and scopes `current`", "fp8 experts and current scopes"),
        ("a second", "02d1adf3", "these and `mamba3_projection`", "fp8 projections"),
        ("a second", "02d1adf3", "the same, its wgrad in bf16", "fp8 projections, gradient in bf16"),
        ("a third", "3845f229", "bf16", "bf16"),
        ("a third", "3845f229", "experts, scopes, `mamba3_projection` and `feed_forward` (**the recipe**)",
         "fp8 projections and MTP"),
        ("a fourth", "63d1c486", "bf16, micro-batches of four, moments in bf16", "micro-batch 4, moments in bf16"),
        ("a fourth", "63d1c486", "the recipe, micro-batches of four, moments in bf16",
         "fp8 projections and MTP, micro-batch 4, moments in bf16"),
    ):  # fmt: skip
        row = one("nam56r_h200", arm=arm, commit=commit)
        yield f"{machine} machine, {label}", "yes", number(row["step_ms"]), number(row["tokens_per_s"])


def vendors() -> Iterator[Line]:
    """Kernels of other packages and ours, in one run."""
    yield "extra", "op", "work", "ms", "ours, ms"
    for extra, benchmark, variant, ours, works in (
        ("flash4", "mla", "flash4", "sdpa", ("forward", BOTH)),
        ("quack", "routed_mlp", "quack", "triton", (BOTH,)),
        ("quack", "linear_cross_entropy", "quack, mean", "chunked, mean", (BOTH,)),
        ("liger", "linear_cross_entropy", "liger, mean", "chunked, mean", (BOTH,)),
    ):
        for work in works:
            run = FLASH4 if extra == "flash4" else "bench_h200"
            pair = (number(op(benchmark, name, work=work, file=run)["ms"]) for name in (variant, ours))
            yield f"`{extra}`", f"`{benchmark}`", work, *pair


def evidence() -> Iterator[Line]:
    """The kernels that ``auto`` takes, and the reference of their op, forward and backward."""
    yield "op", "backend", "ms", "reference, ms", "times"
    for benchmark, backend, words, work in (
        ("mla", "sdpa", "", BOTH),
        ("mla_packed", "triton", "", BOTH),
        ("sparse_mla", "triton", "heads=56", BOTH),
        ("indexer", "triton", "", "forward"),
        ("indexer_grad", "triton", "", "gradient"),
        ("mla_projection", "triton", "", BOTH),
        ("mla_keys", "triton", "", BOTH),
        ("indexer_inputs", "triton", "", BOTH),
        ("mamba3", "triton", "state=64", BOTH),
        ("m2rnn", "triton", "", BOTH),
        ("routed_mlp", "triton", "", BOTH),
        ("grouped_mlp", "triton", "", BOTH),
        ("router", "triton", "", BOTH),
    ):
        ours, plain = (float(op(benchmark, name, words, work)["ms"]) for name in (backend, "reference"))
        yield f"`{benchmark}`", f"`{backend}`", number(ours), number(plain), number(plain / ours)


def overhead() -> Iterator[Line]:
    """Cost of recording a run."""
    yield "commit", "ms a step", "of that recording, ms"
    for row in rows("overhead_h200"):
        yield f"`{row['commit']}`", number(row["step_ms"]), number(row["listeners_ms"])


def megatrons() -> Iterator[Line]:
    """Megatron and torch versions on the CPU, with the newest row of each part."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows("megatrons_cpu"):
        part = row["part"] if row["part"] != "steps" else row["found"].partition(" ")[0].rstrip(":")
        cells.setdefault((row["megatron"], row["torch"]), {})[part] = row
    figures = {
        "compat": r"(\d+ of \d+)",
        "gpt": r"lm loss (\d+\.\d{6}).*digest (\w{6})",
        "hybrid": r"lm loss (\d+\.\d{6}).*digest (\w{6})",
        "demo": r"per byte (\d+\.\d+);",
        "tests": r"((?:\d+ failed, )?\d+ passed)",
    }
    yield "Megatron", "torch", "targets equal", "GPTModel", "HybridModel", "demo", "CPU suite", "commits"
    for (name, torch), parts in sorted(cells.items(), key=lambda cell: (cell[0][1], cell[0][0] != "wheel 0.19.2", cell[0][0])):
        matches = {part: re.search(pattern, parts[part]["found"]) for part, pattern in figures.items() if part in parts}
        shown = [" ".join(match.groups()) if (match := matches.get(part)) else "" for part in figures]
        commits = ", ".join(f"`{commit[:7]}`" for commit in dict.fromkeys(row["commit"] for row in parts.values()))
        yield name, torch, *shown, commits


def long() -> Iterator[Line]:
    """``nam56r_long`` by row length, as ``experiments/long.yaml`` trains it."""
    yield "", "GPUs", "tokens/s a GPU", "MFU %", "GB a GPU"
    for row in sorted(rows("long_h200"), key=lambda row: lengths.read_arm(row["arm"])[:2]):
        count, *_ = lengths.read_arm(row["arm"])
        speed = number(int(row["tokens_per_s"]) / count)
        yield row["arm"], str(count), speed, number(float(row["mfu"]) * 100), gigabytes(row)


def recall() -> Iterator[Line]:
    """Right answers of ``experiments/recall.yaml`` in rows of 32,768 tokens, by task, schedule and distance."""
    tasks, arms = (
        (("needle", "needles"), ("copy", "copies")),
        (("full", "full attention"), ("sparse", "`WFS`"), ("windows", "windows")),
    )
    yield "distance, tokens", *(f"{tasks_}, {label}" for _, tasks_ in tasks for _, label in arms)
    for row in select("recall_answers_h200", arm="full", task="needle"):
        where = {"from": row["from"], "to": row["to"]}
        right = (one("recall_answers_h200", arm=arm, task=task, **where)["right"] for task, _ in tasks for arm, _ in arms)
        yield f"{int(row['from']):,} to {int(row['to']) - 1:,}", *(f"{100 * float(share):.1f}" for share in right)


def twins() -> Iterator[Line]:
    """Models of ``experiments/twins.yaml`` that were trained to the end, with the speed of the fastest run."""
    yield (
        "",
        "parameters, millions",
        "runs",
        "bits a byte, held out",
        "training loss",
        "tokens/s alone",
        "seconds for all tokens",
    )
    finished = [row for row in rows("twins_h200") if int(row["steps"]) == 800]
    for arm, (label, parameters) in TWINS.items():
        runs = [row for row in finished if row["arm"] == arm]
        losses = [dict(word.split(":") for word in row["losses"].split()) for row in runs]
        bits = sorted(float(loss["heldout"]) / math.log(2) / BYTES_A_TOKEN for loss in losses)
        trained = sorted(float(loss["lm_loss"]) for loss in losses)
        ends = (" to ".join(f"{end:.3f}" for end in sorted({figures[0], figures[-1]})) for figures in (bits, trained))
        fastest = min(runs, key=lambda row: float(row["step_ms"]))
        speed = number(fastest["tokens_per_s"]), number(int(fastest["steps"]) * float(fastest["step_ms"]), 1e3)
        if arm in SHARED:
            speed = "", ""
        yield label, f"{parameters / 1e6:.1f}", str(len(runs)), *ends, *speed


TABLES: Mapping[str, Callable[[], Iterator[Line]]] = {
    function.__name__: function
    for function in (ops, models, layouts, scaling, compiled, fp8, vendors, evidence, overhead, megatrons, long, recall, twins)
}


def table(name: str) -> str:
    """Render a table as Markdown."""
    head, *lines = TABLES[name]()
    rule = [
        "---",
        *("---:" if all(re.match(r"[*\d]|$", line[at]) for line in lines) else "---" for at in range(1, len(head))),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def rendered(page: str) -> str:
    """Return a page with its tables rendered from the current rows."""
    return BLOCK.sub(lambda match: f"{match[1]} -->\n{table(match[1])}", page)


def main() -> None:
    """Write all pages."""
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
