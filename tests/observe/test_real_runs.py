"""Real runs on the CPU lane, two for all tests but the exhaustive ones: receipt, page, progress lines and writers' scalars."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import cli
from megacpp_mcore.commands import report_page as page
from megacpp_mcore.model import Layout, flops
from megacpp_mcore.observe import events, goodput, live, receipts
from megacpp_mcore.observe.live import metrics_of
from megacpp_mcore.observe.receipts import claims, facts, fields
from megacpp_mcore.observe.receipts.fields import layers
from megacpp_mcore.observe.steps import read_steps
from tests import forks, tiny_run
from tests.commands.test_report_page import check_self_contained
from tests.observe.real_run import start
from tests.tiny_run import TOKENS, make_data, model

pytestmark = pytest.mark.slow

STEPS = 6
STOCK_MOE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --seq-length 64 --num-experts 4 "
    "--moe-router-topk 2 --moe-expert-capacity-factor 0.5 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type "
    "alltoall --moe-router-force-load-balancing --disable-bias-linear --micro-batch-size 1 --global-batch-size 2 --lr 0.001 "
    f"--train-iters {STEPS} --log-interval 1 --eval-iters 0 --eval-interval {STEPS} --transformer-impl local "
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --distributed-backend gloo --use-cpu-initialization --num-workers 0 --tokenizer-type "
    "NullTokenizer --vocab-size 256 --mock-data"
).split()
"""A stock GPT with experts."""


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run in which a listener fails, and what it printed."""
    run, evaluation = tmp_path_factory.mktemp("runs") / "finished", ("--eval-interval", "3", "--eval-iters", "1")
    return run, start(run, data, STEPS, *evaluation, fate="fault writers").finish()


@pytest.mark.exhaustive
def test_flops_of_packed_documents_are_those_of_their_pairs(tmp_path: Path) -> None:
    """Several documents of up to about fifty tokens in a row of 64: fewer pairs than in full rows, all else equal."""
    (tmp_path / "texts").mkdir()
    for number in range(120):
        (tmp_path / "texts" / f"{number:03d}.txt").write_text(f"{number}" + " some words." * (number % 5))
    data = make_data(tmp_path, [tmp_path / "texts"])
    start(tmp_path / "run", data, 5, "--dataloader-inter-document-masking", "--eod-mask-loss").finish()
    receipt = receipts.read(tmp_path / "run")
    assert receipt["batch"]["documents"] == "packed"
    full = flops.step(model(), 2, vocab_size=384)
    none = flops.step(model(), 2, vocab_size=384, pairs=(0, 0, 0))
    families = {name: family["forward"] for name, family in receipt["flops"]["families"].items()}
    for name, work in families.items():
        least, most = (getattr(step.families, name).forward for step in (none, full))
        if name in ("attention_core", "indexer"):
            assert least + (most - least) * 0.1 < work < least + (most - least) * 0.7, name
        else:
            assert work == least == most, name
    assert receipt["throughput"]["tflops_per_s_per_device"] > 0
    assert sum(receipt["shares"]["groups"].values()) == pytest.approx(1)
    assert receipt["dominant_flops"] in receipt["shares"]["groups"]


def test_a_finished_run(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every field that a CPU run can fill is present and correct; a failed listener does not affect other records."""
    run, _ = finished
    receipt = receipts.read(run)
    failure = "rank 0: Faulty failed in step 4 and recorded nothing more: LookupError: a listener's own error"
    assert failure in receipt["notes"]
    written = json.loads((run / "receipt.json").read_text())
    assert {**receipt, "written_at": ""} == {**written, "written_at": ""}
    assert set(receipt["unknown"]) == {
        "routing.capacity_factor", "profiler", "dominant_time", "throughput.mfu", "throughput.hfu",
        "precision.dequantised", "card",
    }  # fmt: skip
    assert receipt["unknown"]["card"] == "the device is a CPU"
    assert 0 < receipt["time_to_first_step_s"] < receipt["goodput"]["wall_s"]
    assert (receipt["status"], receipt["family"]) == ("finished", "NAM56R")
    assert (receipt["compile_warmup"], receipt["compile"]["reason"]) == ("skipped", "kernels replace what was compiled")
    assert receipt["experimental_taxes"] == []
    assert receipt["ranks"] == {"expected": 1, "found": [0]}
    assert receipt["batch"]["effective_tokens"] == TOKENS
    assert (receipt["loss"]["first_step"], receipt["loss"]["last_step"]) == (1, STEPS)
    assert receipt["loss"]["last"] < receipt["loss"]["first"] < 7
    assert receipt["memory"]["kind"] == "resident set"
    assert "A_SECRET" not in receipt["environment"]
    assert "not for a receipt" not in json.dumps(receipt)
    assert set(receipt["environment"]) <= set(facts.ENVIRONMENT)
    assert (receipt["disqualifiers"], receipt["unjudged"]) == ([], [])

    assert receipt["step_time"]["n"] == STEPS - 3
    counted = flops.step(model(), 2, vocab_size=384).total.training
    assert receipt["flops"]["model_flops"] == counted
    rate = receipt["throughput"]["tflops_per_s_per_device"]
    assert rate == pytest.approx(counted / receipt["step_time"]["p50_s"] / 1e12)
    assert sum(receipt["shares"]["groups"].values()) == pytest.approx(1)
    assert receipt["dominant_flops"] == max(receipt["shares"]["groups"], key=receipt["shares"]["groups"].__getitem__)
    assert receipt["shares"]["source"].startswith("audited count")

    layers = receipt["routing"]["layers"]
    assert [int(layer) for layer in layers] == list(model().layer_numbers("E"))
    for layer in layers.values():
        assert sum(layer["tokens_per_expert"]) == layer["asked"] == STEPS * TOKENS * 2
        assert layer["dropped"] == 0
        assert 0 < layer["entropy"] < 1 < layer["max_over_mean"]
    first, second = (number for number, role in enumerate(model().roles, 1) if role == "F")
    assert 0 < receipt["indexer"]["overlap"][f"{first}-{second}"] < 1
    _check_live_objects(receipt)
    assert cli.main(["report", "show", str(run)]) == 0
    assert "mamba3 auto → reference" in capsys.readouterr().out


def _check_live_objects(receipt: dict[str, Any]) -> None:
    own = {layer for row in of_op(receipt, "linear") if row["requested"] == "auto" for layer in layers(row["layers"])}
    assert own == {*model().layer_numbers("R")}  # their input projections; those of M are an op's
    ops = {(row["op"], layer): row["observed"] for row in receipt["backends"] for layer in layers(row["layers"])}
    assert {layer for op, layer in ops if op == "mamba3_projection"} == set(model().layer_numbers("M"))
    assert {layer for op, layer in ops if op == "mamba3"} == set(model().layer_numbers("M"))
    assert {layer for op, layer in ops if op == "mla"} == {1, "mtp"}
    model_ops = {"mla", "sparse_mla", "indexer", "indexer_grad", "mamba3", "m2rnn", "routed_mlp"}
    model_ops |= {"mla_latents", "mla_projection", "mla_keys", "indexer_inputs"}
    assert {observed for (op, _), observed in ops.items() if op in model_ops} == {"reference"}
    classes = {"linear", "norm", "rms_norm", "feed_forward", "experts", "router", "loss", "optimizer"}
    assert {op for op, _ in ops} == model_ops | classes | {"mamba3_projection"}
    assert {observed for (op, _), observed in ops.items() if op == "mamba3_projection"} == {"torch"}
    assert {observed for (op, _), observed in ops.items() if op in ("linear", "norm")} == {"local"}
    assert (ops["loss", "run"], ops["optimizer", "run"]) == ("megatron", "torch")
    assert {ops["rms_norm", number] for number in range(1, model().depth + 1)} == {"stock"}
    for number in model().layer_numbers("E"):
        assert (ops["experts", number], ops["router", number]) == ("megacpp_mcore", "stock")
    assert receipt["ddp"]["grad_reduce_dtype"] == ["float32"]
    assert sum(receipt["ddp"]["bucket_elements"]) >= receipt["model"]["parameters"]
    names = {patch["name"] for patch in receipt["patches"]}
    assert {"mtp-shared-block", "spec-import"} <= names
    assert all(patch["fingerprints"] for patch in receipt["patches"])


def test_what_is_shown_while_it_trains(finished: tuple[Path, str]) -> None:
    run, output = finished
    recorded = {step.step: step for step in read_steps(run)}
    # Ours stands below Megatron's own line of the same step.
    lines = output.splitlines()
    ours = {number: line for number, line in enumerate(lines) if line.startswith("step ")}
    assert [line.split("/")[0] for line in ours.values()] == [f"step {number}" for number in recorded]
    for number, step in zip(ours, recorded.values(), strict=True):
        assert "goodput" in lines[number]
        assert len(lines[number]) < 240
        stock = re.findall(r"iteration +(\d+)/ +6 \|.* lm loss: (\S+) \|", "\n".join(lines[:number]))[-1]
        assert int(stock[0]) == step.step
        if step.step != 2:  # its line is the mean of two steps
            assert float(stock[1]) == pytest.approx(step.losses["lm loss"], rel=1e-6)
    assert "validation loss at iteration 3" in output
    metrics = metrics_of(events.read(run))
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert [record["tokens_per_s"] is None for record in metrics] == [True] + [False] * (STEPS - 1)
    assert all(record["mfu"] is None and record["mfu_reason"] for record in metrics)
    assert "no datasheet peak is known" in metrics[-1]["mfu_reason"]
    assert all(0 < record["goodput"] < 1 and record["memory_allocated_bytes"] > 2**20 for record in metrics)
    assert metrics[0]["routing_entropy"] is None
    assert 0 < (metrics[-1]["routing_entropy"] or 0) < 1
    assert 0 < (metrics[-1]["index_overlap"] or 0) < 1
    scalars = json.loads((run / "scalars.json").read_text())
    ours = {f"{live.TAG}{name}" for name in live.SCALARS} - {f"{live.TAG}mfu"}
    for writer in ("tensorboard", "wandb"):
        written = Counter((tag, step) for name, tag, _, step in scalars if name == writer)
        assert {tag for tag, _ in written if tag.startswith(live.TAG)} == ours
        assert all(count == 1 for (tag, _), count in written.items() if tag.startswith(live.TAG))
        assert {step for tag, step in written if tag == f"{live.TAG}goodput"} == set(recorded)
        for tag in ("lm loss", "mtp_1 loss", "indexer loss", "grad-norm", "learning-rate"):
            assert {step for name, step in written if name == tag} == set(recorded), (writer, tag)
    # Against what the last rank noted between two steps: their time without evaluation and checkpoints.
    spent = {span.step: span.phases for span in events.read(run)[0][0].spans if span.step is not None}
    assert spent[4]["evaluation"] > 0  # after step 3
    assert goodput.of_rank(events.read(run)[0]).nanoseconds["evaluation"] >= spent[4]["evaluation"]
    for before, after in itertools.pairwise(metrics):
        in_step = sum(spent[after["step"]].get(name, 0) for name in ("step", "data", "idle", "compile", "jit"))
        tokens = recorded[after["step"]].tokens - recorded[before["step"]].tokens
        assert after["tokens_per_s"] == pytest.approx(tokens / in_step * 1e9, rel=1e-9)


def of_op(receipt: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [row for row in receipt["backends"] if row["op"] == op]


def fall_back(receipt: dict[str, Any]) -> str:
    (evidence,) = (entry["evidence"] for entry in receipt["disqualifiers"] if entry["name"] == "fall-back")
    return str(evidence)


def test_a_run_that_an_error_ends_and_a_fall_back(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, data, STEPS, fate="error fall-back patched").finish(1)
    receipt = receipts.read(tmp_path)
    assert (receipt["status"], receipt["loss"]["last_step"]) == ("ArithmeticError", 3)
    assert receipt["routing"]["layers"]["2"]["asked"] == 2 * TOKENS * 2
    (loss,) = of_op(receipt, "loss")
    assert (loss["requested"], loss["observed"]) == ("linear_cross_entropy", "linear_cross_entropy")
    slower = [row for row in receipt["backends"] if row["slower_than_best"]]
    assert [layer for row in slower for layer in layers(row["layers"])] == list(model().layer_numbers("M"))
    (why,) = {row["reason"] for row in slower}
    assert why.endswith(f"kernel does not support this call: head_dim {model().mamba3.head_dim} is not a multiple of 1024")
    evidence = fall_back(receipt)
    assert evidence == f"op mamba3 in layers 3, 7, 11 runs on reference, slower than the best for this device: {why}"
    assert {"backends", "disqualifiers"} <= check_self_contained(page.html(tmp_path)).parts()
    assert cli.main(["report", "show", str(tmp_path)]) == 0
    assert "fall-back: op mamba3" in capsys.readouterr().out
    refusals = claims.compare(receipt, receipt, declared=["fall-back"]).refusals
    assert "A has not finished: its status is ArithmeticError" in refusals
    assert not any("fall-back" in refusal for refusal in refusals)


@pytest.mark.exhaustive
def test_a_stock_model_is_disqualified_by_capacity_forced_balance_and_mock_data(tmp_path: Path) -> None:
    """Our spec refuses these; a baseline without it does not."""
    tiny_run.start(("tests.observe.real_run", str(tmp_path)), STOCK_MOE, None).finish()
    receipt = receipts.read(tmp_path)
    assert [entry["name"] for entry in receipt["disqualifiers"]] == ["mock data", "forced balance", "capacity drop"]
    assert [entry["name"] for entry in receipt["unjudged"]] == ["indexer untrained"]
    assert receipt["pattern"] is None
    assert "the run has no spec" in (fields.why_unknown("pattern", receipt["unknown"]) or "")
    assert receipt["routing"]["expert_input"] == "padded"
    assert (receipt["routing"]["top_k"], receipt["routing"]["experts"]) == (2, 4)
    for layer in receipt["routing"]["layers"].values():
        assert layer["dropped"] > 0
        assert sum(layer["tokens_per_expert"]) + layer["dropped"] == layer["asked"] == STEPS * 128 * 2


@pytest.mark.exhaustive
def test_the_parts_of_two_ranks_make_one_receipt(data: Path, tmp_path: Path) -> None:
    words = tiny_run.words(data, STEPS, layout=Layout(expert=2))
    program = ["-m", "tests.observe.real_run", str(tmp_path), *words]
    status, output = forks.run_ranks(program, 2, MEGACPP_CONFIG=str(data / "config.yaml"))
    assert status == 0, output[-4000:]
    merged = receipts.read(tmp_path)
    assert json.loads((tmp_path / "receipt.json").read_text())["status"] == merged["status"] == "finished"
    assert merged["ranks"] == {"expected": 2, "found": [0, 1]}
    assert (merged["parallelism"]["expert"], merged["parallelism"]["data"], merged["parallelism"]["hosts"]) == (2, 2, 1)
    assert len(merged["memory"]["ranks"]) == 2
    for layer in merged["routing"]["layers"].values():
        assert sum(layer["tokens_per_expert"]) == layer["asked"] == STEPS * TOKENS * 2
