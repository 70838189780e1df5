"""``megacpp-mcore recipe``: what it prints, and that the printed command is one stock Megatron takes."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megacpp_mcore.arguments.lowering import mismatches
from megacpp_mcore.commands import cli
from megacpp_mcore.model import PRESETS, preset
from megacpp_mcore.model.flops import peaks
from megacpp_mcore.model.flops.recompute import Recomputation
from megacpp_mcore.model.flops.utilisation import page
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.training import HYBRID, Recompute
from tests import stock
from tests.data.hugging_face import save_words

LAUNCHED = ["-m", "megacpp_mcore", "launch", "--device", "cuda", "--"]


@pytest.fixture(scope="module")
def lane() -> Iterator[None]:
    with stock.cpu_lane():
        yield


def recipe(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(["recipe", *words]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def stock_words(command: str) -> tuple[list[str], list[str]]:
    """The words before and after ``pretrain_hybrid.py`` of a printed command."""
    words = shlex.split(command.replace("\\\n", " "))
    at = words.index("pretrain_hybrid.py")
    assert words.pop() == "$@"
    return words[:at], words[at + 1 :]


def test_list_has_a_line_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    lines = recipe(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines] == [*PRESETS, *RECIPES]
    assert "52 layers (13 A, 22 E, 13 M, 4 R), hidden 3584, 4.503 B parameters, MTP 2" in lines[0]


@pytest.mark.parametrize("name", PRESETS)
def test_show_is_the_whole_definition(capsys: pytest.CaptureFixture[str], name: str) -> None:
    model, shown = preset(name), json.loads(recipe(capsys, "show", name))
    assert shown["layers"] == model.layers
    assert {int(number): role for number, role in shown["attention_roles"].items()} == {
        number: role for number, role in enumerate(model.roles, 1) if role
    }
    total = shown["parameters"].pop("total")
    assert shown["parameters"] == model.parameters()
    assert total == sum(model.parameters().values())
    assert shown["dsa"]["topk"] == model.dsa.topk
    assert shown["rope_theta"] == model.rope_theta


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], 1),
        (["--tensor", "2", "--sequence-parallel"], 2),
        (["--tensor", "2", "--expert", "4", "--sequence-parallel"], 4),
    ],
)
@pytest.mark.parametrize("name", ["nam56r", "nam52"])
def test_printed_commands_are_what_stock_takes(
    lane: None, capsys: pytest.CaptureFixture[str], name: str, options: list[str], processes: int
) -> None:
    before, words = stock_words(recipe(capsys, "emit", name, "--impl", "local", "--data", "some where", *options))
    environment = ["env", "CUDA_DEVICE_MAX_CONNECTIONS=1"] if "--tensor" in options else []
    assert before == [*environment, "torchrun", "--nproc-per-node", str(processes), *LAUNCHED]
    assert words[words.index("--data-path") + 1] == "some where"
    alone = recipe(capsys, "emit", name, "--impl", "local", "--data", "some where", *options, "--as", "args")
    assert alone.splitlines() == words  # `launch` sets the variable by itself
    from megatron.training.argument_utils import hybrid_config_from_args

    config = hybrid_config_from_args(stock.parse(words, processes))
    assert mismatches(preset(name), [config.transformer, config], HYBRID) == []


def test_arguments_after_two_dashes_say_how_a_run_is_carried_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = recipe(
        capsys, "emit", "nam56r", "--as", "args", "--data", "c", "--", "--use-torch-fsdp2", "--log-interval", "3"
    ).split()
    assert words[-6:-3] == ["--use-torch-fsdp2", "--log-interval", "3"]
    assert words[words.index("--ckpt-format") + 1] == "torch_dcp"
    assert not {"--use-distributed-optimizer", "--overlap-grad-reduce"} & set(words)


@pytest.mark.parametrize(
    ("model_class", "words", "named"),
    [
        ("gpt", "--hidden-size 64", "--hidden-size after -- would change the model"),
        ("gpt", "--seq-length 64", "--seq-length after -- would change the model"),
        ("gpt", "--swiglu --rotary-percent 0.5", "--swiglu, --rotary-percent after -- would change the model"),
        ("gpt", "--hybrid-layer-pattern MMMM", "--hybrid-layer-pattern after -- would change the model"),
        ("hybrid", "--hybrid-layer-pattern MMMM", "--hybrid-layer-pattern after -- would change the model"),
        ("hybrid", "--num-layers 52", "--num-layers after -- would change the model"),
        ("gpt", "pretrain_gpt.py --save x", "pretrain_gpt.py after -- belongs to no argument"),
    ],
)
def test_arguments_after_two_dashes_leave_the_model_as_it_is(
    capsys: pytest.CaptureFixture[str], model_class: str, words: str, named: str
) -> None:
    command = ["emit", "nam56r_tiny", "--model-class", model_class, "--data", "c", "--"]
    assert named in recipe(capsys, *command, *words.split(), status=2)
    assert "--seq-length 256" in recipe(capsys, *command, "--seq-length", "256")


def test_recipes_in_fp8_are_the_fastest_rows_in_fp8() -> None:
    """Their settings are those of the fastest arm in FP8 with their micro-batches; the rest is that of their twins in bf16."""
    experiments = Path(__file__).parents[2] / "experiments"
    arms = yaml.safe_load((experiments / "nam56r.yaml").read_text(encoding="utf-8"))["arms"]
    with (experiments / "results" / "nam56r_h200.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rates = {row["arm"]: int(row["tokens_per_s"]) for row in rows}
    assert rates.keys() == arms.keys() - {"fp8 projections, MTP and its projection"}  # which waits for its row
    as_the_recipe = [arm for arm in rates if "fp8" in str(arms[arm]) and "training" not in arms[arm]]
    fastest = max(as_the_recipe, key=lambda arm: rates[arm])
    commit = next(row["commit"] for row in reversed(rows) if row["arm"] == fastest)
    beside = [row for row in rows if row["commit"] == commit and row["arm"] == "bf16"]
    assert rates[fastest] > max(rates["fp8 experts by Transformer Engine"], *(int(row["tokens_per_s"]) for row in beside))
    assert beside
    ours = {name: recipe for name, recipe in RECIPES.items() if "fp8" in name}
    assert len(ours) == 4
    for name, recipe in ours.items():
        assert recipe.settings is not None
        content = yaml.safe_load(recipe.settings.read_text(encoding="utf-8"))
        assert content == {"model": recipe.model.name} | arms[fastest]["settings"]
        twin = RECIPES[name.replace("fp8", "bf16")]
        assert recipe == dataclasses.replace(twin, name=name, settings=recipe.settings)


def test_a_recipe_in_fp8_brings_its_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, own = "nam56r_pretrain_4gpu_h200_fp8", RECIPES["nam56r_pretrain_4gpu_h200_fp8"].settings
    assert own is not None
    assert stock_words(recipe(capsys, "emit", name))[0][:2] == ["env", f"MEGACPP_CONFIG={own}"]
    arguments = ["recipe", "emit", name, "--as", "args", "--data", "none"]
    assert cli.main(arguments) == 2
    assert f"MEGACPP_CONFIG={own}" in capsys.readouterr().err
    monkeypatch.setenv("MEGACPP_CONFIG", str(own))
    assert cli.main(arguments) == 0
    assert "MEGACPP_CONFIG" not in capsys.readouterr().err
    monkeypatch.delenv("MEGACPP_CONFIG")
    changed = tmp_path / "changed.yaml"
    recipe(capsys, "emit", name, "--set", "dsa.topk=128", "train_iters=-1", "--settings", str(changed), status=2)
    assert not changed.exists()
    recipe(capsys, "emit", name, "--set", "dsa.topk=128", "--settings", str(changed))
    kept = yaml.safe_load(changed.read_text(encoding="utf-8"))
    assert kept == yaml.safe_load(own.read_text(encoding="utf-8")) | {"overrides": {"dsa": {"topk": 128}}}

    monkeypatch.setenv("MEGACPP_CONFIG", str(changed))  # a file of the user's that has them, too
    assert f"MEGACPP_CONFIG={changed}" in recipe(capsys, "emit", name)
    assert json.loads(recipe(capsys, "show", name))["training"]["settings"] == str(own)
    for without in ({"fp8": {"recipe": "block", "blanket": True}}, {"backends": {"mla": "sdpa"}}):
        changed.write_text(yaml.safe_dump(kept | without), encoding="utf-8")
        message = recipe(capsys, "emit", name, status=2)
        assert f"{changed} (MEGACPP_CONFIG) differs in backends or fp8 from {own}" in message
    changed.write_text("model: nam56r_tiny\n", encoding="utf-8")  # of another model
    assert f"MEGACPP_CONFIG={own}" in recipe(capsys, "emit", name)


def test_devices_and_tokenizers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = save_words(tmp_path / "a b", {"<unk>": 0, "one": 1}, ["<eos>"], eos_token="<eos>")
    on_gpu, words = stock_words(recipe(capsys, "emit", "nam56r_tiny", "--device", "cuda", "--tokenizer", str(folder)))
    assert on_gpu == ["torchrun", "--nproc-per-node", "1", *LAUNCHED]
    assert {"--bf16", "transformer_engine", "--moe-grouped-gemm"} <= set(words)
    at = words.index("--tokenizer-type")
    assert words[at : at + 4] == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    larger = save_words(tmp_path / "larger", {f"w{n}": n for n in range(300)}, ["<eos>"], eos_token="<eos>")
    said = recipe(capsys, "emit", "nam56r_tiny", "--tokenizer", str(larger), status=2)
    assert f"the tokenizer {larger} has 301 ids, and the model 260; set the model's vocab_size to 301" in said
    on_cpu, words = stock_words(recipe(capsys, "emit", "nam56r", "--device", "cpu"))
    assert on_cpu == ["megacpp-mcore", "launch", "--device", "cpu", "--nproc", "1", "--"]
    assert "--bf16" not in words
    assert words[words.index("--vocab-size") + 1] == "65536"


@pytest.mark.parametrize(("model", "is_left_out"), [("nam56r", False), ("nam56r_tiny", True)])  # in bf16 and in fp32
def test_graphs_that_are_left_out_are_named(capsys: pytest.CaptureFixture[str], model: str, is_left_out: bool) -> None:
    assert cli.main(["recipe", "emit", model, "--set", "cuda_graphs=true"]) == 0
    captured = capsys.readouterr()
    assert ("--cuda-graph-impl local" not in captured.out) == is_left_out
    assert ("note: cuda_graphs=true is left out: layers are captured with Transformer Engine" in captured.err) == is_left_out


def test_an_unset_data_prefix_stops_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    command = recipe(capsys, "emit", "nam56r").replace("torchrun", "echo")

    def shell(**variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": "/usr/bin:/bin"} | variables
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=env)

    unset = shell()
    assert unset.returncode != 0
    assert "prefix of a prepared dataset" in unset.stderr
    assert "--data-path a b --split" in shell(DATA_PREFIX="a b").stdout


@pytest.mark.parametrize(
    ("overrides", "options", "processes"),
    [
        ("moe: {experts: 6}", "--tensor 2 --expert 3 --sequence-parallel --global-batch-size 3", 6),
        # A batch is spread over replicas and not over stages.
        ("dsa: {schedule: -FF}", "--pipeline 2 --gpus-per-node 2 --global-batch-size 1", 2),
        ("dsa: {schedule: -FF}", "--pipeline 2 --gpus-per-node 6 --global-batch-size 3", 6),
        ("dsa: {schedule: -FF}", "--pipeline 2 --gpus-per-node 6 --global-batch-size 4", 0),
        # Nor over ranks that share its sequences.
        ("", "--context 2 --gpus-per-node 2 --global-batch-size 1", 2),
        ("", "--context 2 --gpus-per-node 6 --global-batch-size 4", 0),
    ],
)
def test_processes_of_layouts(
    lane: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    overrides: str, options: str, processes: int,
) -> None:  # fmt: skip
    file = tmp_path / "a file.yaml"
    file.write_text(f"model: nam56r_tiny\noverrides: {{{overrides}}}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(file))
    printed = recipe(capsys, "emit", "nam56r_tiny", *options.split(), status=0 if processes else 2)
    if not processes:
        assert "not a multiple of the micro-batch (1) × 3 data-parallel replicas" in printed
        return
    before, words = stock_words(printed)
    assert before[before.index("--nproc") + 1] == str(processes)
    assert ("--context-parallel-size" in words) == ("--context" in options)
    if "experts" in overrides:
        assert stock.model_config(words, processes).transformer.num_moe_experts == 6


def test_flops_are_counted_for_a_model_a_recipe_and_a_changed_model(capsys: pytest.CaptureFixture[str]) -> None:
    printed = recipe(capsys, "flops", "nam56r")
    assert printed == page(preset("nam56r")) + "\n"
    assert printed.splitlines()[0] == "nam56r, one sequence of 4096 tokens, recompute: none"
    assert "model FLOPs (MFU): 20.853 GFLOP a token of training, nothing recomputed" in printed
    assert recipe(capsys, "flops", "nam56r_pretrain_8gpu_h200_bf16") == printed
    full = json.loads(recipe(capsys, "flops", "nam56r", "--json"))
    changed = json.loads(recipe(capsys, "flops", "nam56r", "--set", "moe.topk=1", "--json"))
    assert (
        full["families"]["routed_experts"]["forward"]
        == preset("nam56r").moe.topk * (changed["families"]["routed_experts"]["forward"])
    )
    assert changed["model_flops"] < full["model_flops"]
    again = json.loads(recipe(capsys, "flops", "nam56r", "--recompute", "experts", "--json"))
    assert again["recomputed_flops"] == full["families"]["routed_experts"]["forward"]
    stocks = ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2"]
    how = Recomputation(granularity="full", method="block", num_layers=2)
    printed = recipe(capsys, "flops", "nam56r", *stocks, "--seq-length", "512").rstrip("\n")
    assert printed == page(preset("nam56r"), how, seq_length=512)
    both = ["--recompute-granularity", "selective", "--recompute"]
    how = Recomputation(granularity="selective", modules=("core_attn",), own=Recompute(m=True, experts=True))
    assert recipe(capsys, "flops", "nam56r", *both, "m", "experts").rstrip("\n") == page(preset("nam56r"), how)
    assert "--recompute-modules core_attn" in recipe(capsys, "flops", "nam56r", *both, "a", status=2)
    assert "seq_length is 0" in recipe(capsys, "flops", "nam56r", "--seq-length", "0", status=2)
    assert "seed" in recipe(capsys, "flops", "nam56r", "--set", "seed=1", status=2)
    assert "did you mean 'nam56r'" in recipe(capsys, "flops", "nam56", status=2)


def test_a_command_names_the_file_that_changes_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file.yaml"
    file.write_text("model: nam56r_tiny\noverrides: {dsa: {topk: 8}}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(file))

    def topk_of(command: str) -> str:
        _, words = stock_words(command)
        return words[words.index("--dsa-indexer-topk") + 1]

    def is_of_the_file(name: str) -> None:
        command = recipe(capsys, "emit", name)
        assert stock_words(command)[0][:2] == ["env", f"MEGACPP_CONFIG={file}"]
        assert topk_of(command) == "8"

    is_of_the_file("nam56r_tiny")
    assert cli.main(["recipe", "emit", "nam56r_quarter"]) == 0
    printed = capsys.readouterr()
    assert stock_words(printed.out)[0][0] == "torchrun"
    assert topk_of(printed.out) == "256"
    assert all(named in printed.err for named in (str(file), "nam56r_tiny", "nam56r_quarter"))
    for name, topk in (("nam56r_tiny", 8), ("nam56r_quarter", 256)):
        assert json.loads(recipe(capsys, "show", name))["dsa"]["topk"] == topk
    file.write_text("model: nam56r_tiny\noverrides: {name: mine, dsa: {topk: 8}}\n")
    for name in ("mine", "nam56r_tiny"):
        is_of_the_file(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGACPP_CONFIG", file.name)  # by a relative path the environment has it, too
    assert recipe(capsys, "emit", "mine", "--as", "args", "--data", "none")
    file.write_text("modell: x\n")
    assert "'modell'" in recipe(capsys, "emit", "nam56r_tiny", status=2)


def test_the_peaks_of_the_flops_page_are_those_that_are_used() -> None:
    text = (Path(__file__).parents[2] / "docs" / "flops.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if "NVIDIA H" in line]
    assert [name for name, *_ in rows] == list(peaks.DEVICES)
    for name, *rates in rows:
        assert dict(zip(peaks.PRECISIONS, map(float, rates), strict=True)) == dict(peaks.DEVICES[name][1])
