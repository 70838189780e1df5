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
    """Documents of up to some fifty tokens, several in a row of 64: fewer pairs than in whole rows, and the rest as there."""
    (tmp_path / "texts").mkdir()
    for number in range(120):
        (tmp_path / "texts" / f"{number:03d}.txt").write_text(f"{number}" + " some words." * (number % 5))
    data = make_data(tmp_path, [tmp_path / "texts"])
    start(tmp_path / "run", data, 5, "--dataloader-inter-document-masking", "--eod-mask-loss").finish()
    found = receipts.read(tmp_path / "run")
    assert found["batch"]["documents"] == "packed"
    whole = flops.step(model(), 2, vocab_size=384)
    none = flops.step(model(), 2, vocab_size=384, pairs=(0, 0, 0))
    families = {name: one["forward"] for name, one in found["flops"]["families"].items()}
    for name, work in families.items():
        least, most = (getattr(step.families, name).forward for step in (none, whole))
        if name in ("attention_core", "indexer"):
            assert least + (most - least) * 0.1 < work < least + (most - least) * 0.7, name
        else:
            assert work == least == most, name
    assert found["throughput"]["tflops_per_s_per_device"] > 0
    assert sum(found["shares"]["groups"].values()) == pytest.approx(1)
    assert found["dominant_flops"] in found["shares"]["groups"]


def test_a_finished_run(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every field that a CPU run can have is there, and says what happened; what failed affects nobody else's record."""
    run, _ = finished
    found = receipts.read(run)
    failure = "rank 0: Faulty failed in step 4 and recorded nothing more: LookupError: a listener's own error"
    assert failure in found["notes"]
    written = json.loads((run / "receipt.json").read_text())
    assert {**found, "written_at": ""} == {**written, "written_at": ""}
    assert set(found["unknown"]) == {
        "routing.capacity_factor", "profiler", "dominant_time", "throughput.mfu", "throughput.hfu",
        "precision.dequantised", "card",
    }  # fmt: skip
    assert found["unknown"]["card"] == "the device is a CPU"
    assert 0 < found["time_to_first_step_s"] < found["goodput"]["wall_s"]
    assert (found["status"], found["family"]) == ("finished", "NAM56R")
    assert (found["compile_warmup"], found["compile"]["reason"]) == ("skipped", "kernels replace what was compiled")
    assert found["experimental_taxes"] == []
    assert found["ranks"] == {"expected": 1, "found": [0]}
    assert found["batch"]["effective_tokens"] == TOKENS
    assert (found["loss"]["first_step"], found["loss"]["last_step"]) == (1, STEPS)
    assert found["loss"]["last"] < found["loss"]["first"] < 7
    assert found["memory"]["kind"] == "resident set"
    assert "A_SECRET" not in found["environment"]
    assert "not for a receipt" not in json.dumps(found)
    assert set(found["environment"]) <= set(facts.ENVIRONMENT)
    assert (found["disqualifiers"], found["unjudged"]) == ([], [])

    assert found["step_time"]["n"] == STEPS - 3
    counted = flops.step(model(), 2, vocab_size=384).total.training
    assert found["flops"]["model_flops"] == counted
    rate = found["throughput"]["tflops_per_s_per_device"]
    assert rate == pytest.approx(counted / found["step_time"]["p50_s"] / 1e12)
    assert sum(found["shares"]["groups"].values()) == pytest.approx(1)
    assert found["dominant_flops"] == max(found["shares"]["groups"], key=found["shares"]["groups"].__getitem__)
    assert found["shares"]["source"].startswith("audited count")

    layers = found["routing"]["layers"]
    assert [int(layer) for layer in layers] == list(model().layer_numbers("E"))
    for layer in layers.values():
        assert sum(layer["tokens_per_expert"]) == layer["asked"] == STEPS * TOKENS * 2
        assert layer["dropped"] == 0
        assert 0 < layer["entropy"] < 1 < layer["max_over_mean"]
    first, second = (number for number, role in enumerate(model().roles, 1) if role == "F")
    assert 0 < found["indexer"]["overlap"][f"{first}-{second}"] < 1
    _check_live_objects(found)
    assert cli.main(["report", "show", str(run)]) == 0
    assert "mamba3 auto → reference" in capsys.readouterr().out


def _check_live_objects(found: dict[str, Any]) -> None:
    own = {layer for one in of_op(found, "linear") if one["requested"] == "auto" for layer in layers(one["layers"])}
    assert own == {*model().layer_numbers("R")}  # their input projections; those of M are an op's
    ops = {(one["op"], layer): one["observed"] for one in found["backends"] for layer in layers(one["layers"])}
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
    assert found["ddp"]["grad_reduce_dtype"] == ["float32"]
    assert sum(found["ddp"]["bucket_elements"]) >= found["model"]["parameters"]
    names = {patch["name"] for patch in found["patches"]}
    assert {"mtp-shared-block", "spec-import"} <= names
    assert all(patch["fingerprints"] for patch in found["patches"])


def test_what_is_shown_while_it_trains(finished: tuple[Path, str]) -> None:
    run, said = finished
    recorded = {step.step: step for step in read_steps(run)}
    # Ours stands below Megatron's own line of the same step.
    lines = said.splitlines()
    ours = {number: line for number, line in enumerate(lines) if line.startswith("step ")}
    assert [line.split("/")[0] for line in ours.values()] == [f"step {number}" for number in recorded]
    for number, step in zip(ours, recorded.values(), strict=True):
        assert "goodput" in lines[number]
        assert len(lines[number]) < 240
        stock = re.findall(r"iteration +(\d+)/ +6 \|.* lm loss: (\S+) \|", "\n".join(lines[:number]))[-1]
        assert int(stock[0]) == step.step
        if step.step != 2:  # whose line is the mean of two steps
            assert float(stock[1]) == pytest.approx(step.losses["lm loss"], rel=1e-6)
    assert "validation loss at iteration 3" in said
    metrics = metrics_of(events.read(run))
    assert [one["step"] for one in metrics] == list(range(1, STEPS + 1))
    assert [one["tokens_per_s"] is None for one in metrics] == [True] + [False] * (STEPS - 1)
    assert all(one["mfu"] is None and one["mfu_reason"] for one in metrics)
    assert "no datasheet peak is known" in metrics[-1]["mfu_reason"]
    assert all(0 < one["goodput"] < 1 and one["memory_allocated_bytes"] > 2**20 for one in metrics)
    assert metrics[0]["routing_entropy"] is None
    assert 0 < (metrics[-1]["routing_entropy"] or 0) < 1
    assert 0 < (metrics[-1]["index_overlap"] or 0) < 1
    scalars = [json.loads(line) for line in (run / "scalars.jsonl").read_text().splitlines()]
    ours = {f"{live.TAG}{name}" for name in live.SCALARS} - {f"{live.TAG}mfu"}
    for writer in ("tensorboard", "wandb"):
        written = Counter((one["tag"], one["step"]) for one in scalars if one["writer"] == writer)
        assert {tag for tag, _ in written if tag.startswith(live.TAG)} == ours
        assert all(count == 1 for (tag, _), count in written.items() if tag.startswith(live.TAG))
        assert {step for tag, step in written if tag == f"{live.TAG}goodput"} == set(recorded)
        for tag in ("lm loss", "mtp_1 loss", "indexer loss", "grad-norm", "learning-rate"):
            assert {step for name, step in written if name == tag} == set(recorded), (writer, tag)
    # Against what the last rank noted between two steps: their time without evaluation and checkpoints.
    spent = {span.step: span.phases for span in events.read(run)[0][0].spans if span.step is not None}
    assert spent[4]["evaluation"] > 0  # after step 3
    assert goodput.of_rank(events.read(run)[0]).nanoseconds["evaluation"] >= spent[4]["evaluation"]
    for before, one in itertools.pairwise(metrics):
        in_step = sum(spent[one["step"]].get(name, 0) for name in ("step", "data", "idle", "compile", "jit"))
        tokens = recorded[one["step"]].tokens - recorded[before["step"]].tokens
        assert one["tokens_per_s"] == pytest.approx(tokens / in_step * 1e9, rel=1e-9)


def of_op(receipt: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [one for one in receipt["backends"] if one["op"] == op]


def fall_back(receipt: dict[str, Any]) -> str:
    (evidence,) = (one["evidence"] for one in receipt["disqualifiers"] if one["name"] == "fall-back")
    return str(evidence)


def test_a_run_that_an_error_ends_and_a_fall_back(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, data, STEPS, fate="error fall-back patched").finish(1)
    found = receipts.read(tmp_path)
    assert (found["status"], found["loss"]["last_step"]) == ("ArithmeticError", 3)
    assert found["routing"]["layers"]["2"]["asked"] == 2 * TOKENS * 2
    (loss,) = of_op(found, "loss")
    assert (loss["requested"], loss["observed"]) == ("linear_cross_entropy", "linear_cross_entropy")
    slower = [one for one in found["backends"] if one["slower_than_best"]]
    assert [layer for one in slower for layer in layers(one["layers"])] == list(model().layer_numbers("M"))
    (why,) = {one["reason"] for one in slower}
    assert why.endswith(
        f"kernel does not support this call: head_dim {model().mamba3.head_dim} is not a multiple of 1024"
    )
    evidence = fall_back(found)
    assert evidence == f"op mamba3 in layers 3, 7, 11 runs on reference, slower than the best for this device: {why}"
    assert {"backends", "disqualifiers"} <= check_self_contained(page.html(tmp_path)).parts()
    assert cli.main(["report", "show", str(tmp_path)]) == 0
    assert "fall-back: op mamba3" in capsys.readouterr().out
    refusals = claims.compare(found, found, declared=["fall-back"]).refusals
    assert "A has not finished: its status is ArithmeticError" in refusals
    assert not any("fall-back" in refusal for refusal in refusals)


@pytest.mark.exhaustive
def test_a_stock_model_is_disqualified_by_capacity_forced_balance_and_mock_data(tmp_path: Path) -> None:
    """Our spec refuses these; a baseline without it does not."""
    tiny_run.start(("tests.observe.real_run", str(tmp_path)), STOCK_MOE, None).finish()
    found = receipts.read(tmp_path)
    assert [one["name"] for one in found["disqualifiers"]] == ["mock data", "forced balance", "capacity drop"]
    assert [one["name"] for one in found["unjudged"]] == ["indexer untrained"]
    assert found["pattern"] is None
    assert "no spec, none of this package" in (fields.why_unknown("pattern", found["unknown"]) or "")
    assert found["routing"]["expert_input"] == "padded"
    assert (found["routing"]["top_k"], found["routing"]["experts"]) == (2, 4)
    for layer in found["routing"]["layers"].values():
        assert layer["dropped"] > 0
        assert sum(layer["tokens_per_expert"]) + layer["dropped"] == layer["asked"] == STEPS * 128 * 2


@pytest.mark.exhaustive
def test_the_parts_of_two_ranks_make_one_receipt(data: Path, tmp_path: Path) -> None:
    words = tiny_run.words(data, STEPS, layout=Layout(expert=2))
    program = ["-m", "tests.observe.real_run", str(tmp_path), *words]
    status, said = forks.run_ranks(program, 2, MEGACPP_CONFIG=str(data / "config.yaml"))
    assert status == 0, said[-4000:]
    found = receipts.read(tmp_path)
    assert json.loads((tmp_path / "receipt.json").read_text())["status"] == found["status"] == "finished"
    assert found["ranks"] == {"expected": 2, "found": [0, 1]}
    assert (found["parallelism"]["expert"], found["parallelism"]["data"], found["parallelism"]["hosts"]) == (2, 2, 1)
    assert len(found["memory"]["ranks"]) == 2
    for layer in found["routing"]["layers"].values():
        assert sum(layer["tokens_per_expert"]) == layer["asked"] == STEPS * TOKENS * 2
