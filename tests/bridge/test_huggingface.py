"""Export to Hugging Face's formats and back: the model, its tokens, its files, in an environment with transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import HYBRID
from tests import forks, stock, tiny_run
from tests.bridge.processes import CLI, outcomes, run
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import launch
from tests.saved import flip

pytestmark = [pytest.mark.bridge, pytest.mark.slow]

HERE = Path(__file__).parent
LAUNCH = ("megacpp_mcore", "launch", "--device", "cpu", "--")
CUT = 20
"""Tokens of the prompt in from_pretrained.py."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a checkpoint of three steps in ``saved``, and tokens."""
    folder = tiny_run.make_data(tmp_path_factory.mktemp("huggingface"))
    words = tiny_run.words(folder, 3, "--save", str(folder / "saved"), "--save-interval", "3")
    tiny_run.start(LAUNCH, words, folder).finish()
    tokens = torch.tensor([list(Path(__file__).read_bytes()[: tiny_run.SEQ_LENGTH])])
    torch.save({"tokens": tokens}, folder / "megatron.pt")
    return folder


Command = Callable[..., str]


@pytest.fixture(scope="module")
def command(bridge_python: Path, place: Path) -> Command:
    """Run ``megacpp-mcore checkpoint …`` for the tiny model; expect exit status ``status``."""

    def call(*words: object, status: int = 0, settings: str = str(place / "config.yaml")) -> str:
        options = ("megacpp_mcore", "checkpoint", *map(str, words), "--model", "nam56r_tiny")
        done = run(bridge_python, *options, status=status, MEGACPP_CONFIG=settings)
        return done.stdout + done.stderr

    return call


@pytest.fixture(scope="module")
def exported(command: Command, place: Path) -> Path:
    command("export", place / "saved", place / "exported")
    return place / "exported"


def megatrons(place: Path, checkpoint: Path, *more: str) -> dict[str, torch.Tensor]:
    """Return the outputs of Megatron's model of a checkpoint for the tokens."""
    shutil.copyfile(place / "megatron.pt", tokens := place / "found.pt")
    words = tiny_run.words(place, 1, "--load", str(checkpoint), "--tokens", str(tokens), *more)
    tiny_run.start((*LAUNCH, str(HERE / "megatron_logits.py")), words, place).finish()
    return torch.load(tokens)


@pytest.fixture(scope="module")
def megatron(place: Path) -> dict[str, torch.Tensor]:
    return megatrons(place, place / "saved")


@pytest.fixture(scope="module")
def found(bridge_python: Path, place: Path, exported: Path) -> dict[str, Any]:
    """The results of from_pretrained.py."""
    return loaded(bridge_python, exported, place / "megatron.pt", place)


def loaded(python: Path, exported: Path, tokens: Path, place: Path, *only: str) -> dict[str, Any]:
    """Return the script's results for an export, run in ``place``."""
    elsewhere = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGACPP_CONFIG")}
    words = [str(word) for word in (HERE / "from_pretrained.py", exported, tokens, place / "hf.pt", *only)]
    done = forks.run(words, cwd=place, env=elsewhere, python=str(python))
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(place / "hf.pt")


def test_windows_and_yarn(bridge_python: Path, place: Path, tmp_path: Path) -> None:
    """For a long-context model, with positions beyond YaRN's original length."""
    yarn = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.5}
    overrides = {"seq_length": tiny_run.SEQ_LENGTH, "mla": {"window_size": 9, "yarn": yarn}, "dsa": {"schedule": "FSW"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": "nam56r_tiny_long", "overrides": overrides}))
    model, text = with_overrides(preset("nam56r_tiny_long"), overrides), ("--data-path", str(place / "text"), "--split")
    common = {"data": (*text, "90,10,0"), "global_batch_size": 2, "train_iters": 2}
    words = stock.words(model, "--save", str(tmp_path / "saved"), "--save-interval", "2", **common)
    tiny_run.start(LAUNCH, words, tmp_path).finish()
    shutil.copyfile(place / "megatron.pt", tokens := tmp_path / "tokens.pt")
    words = stock.words(model, "--load", str(tmp_path / "saved"), "--tokens", str(tokens), **common)
    tiny_run.start((*LAUNCH, str(HERE / "megatron_logits.py")), words, tmp_path).finish()
    options = ("megacpp_mcore", "checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / "exported"))
    run(bridge_python, *options, "--model", model.name, MEGACPP_CONFIG=str(tmp_path / "config.yaml"))
    check_logits(loaded(bridge_python, tmp_path / "exported", tokens, tmp_path, "logits"), torch.load(tokens))


def check_logits(found: dict[str, Any], megatron: dict[str, torch.Tensor]) -> None:
    vocabulary = found["logits"].shape[-1]
    torch.testing.assert_close(found["logits"], megatron["logits"][..., :vocabulary], rtol=0, atol=1e-5)
    # The last token that multi-token prediction knows is another there.
    torch.testing.assert_close(found["ahead"][:, :-2], megatron["ahead"][:, :-2, :vocabulary], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["cached"], found["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["cached by its new name"], found["logits"][:, CUT:], rtol=0, atol=1e-5)


def test_logits_are_megatrons(found: dict[str, Any], megatron: dict[str, torch.Tensor]) -> None:
    check_logits(found, megatron)
    assert found["text"] == "ümläut(\n"


def test_bf16_rounds_as_megatrons_does(found: dict[str, Any], place: Path) -> None:
    exact = found["logits"]
    reference = megatrons(place, place / "saved", "--bf16")["logits"][..., : exact.shape[-1]]
    assert found["bf16"].dtype == reference.dtype == torch.bfloat16
    ours, stock = (float((rounded.float() - exact).square().mean().sqrt()) for rounded in (found["bf16"], reference))
    assert stock / 1.5 < ours < 1.5 * stock, (ours, stock)


def test_padding_offloading_and_recompute_change_nothing(found: dict[str, Any]) -> None:
    logits, padding = found["logits"], 7
    torch.testing.assert_close(found["padded"][0, padding:], logits[0, :-padding], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["padded"][1], logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["padded on the right"], found["without padding"], rtol=0, atol=1e-5)
    torch.testing.assert_close(found["offloaded"], logits, rtol=0, atol=1e-5)
    assert torch.equal(found["by two"][1], found["generated"][0])
    assert len(found["beams"][0]) == CUT + 5
    torch.testing.assert_close(found["gradient True"], found["gradient False"])
    assert found["gradient True"].abs().sum() > 0
    assert found["fresh"] < 10


def test_greedy_tokens_are_those_of_sample(found: dict[str, Any], place: Path) -> None:
    prompt = bytes(torch.load(place / "megatron.pt")["tokens"][0, :CUT].tolist()).decode()
    options = ("--device", "cpu", "--prompt", prompt, "--tokens", "80", "--temperature", "0", "--")
    words = ["--load", str(place / "saved"), *tiny_run.words(place, 1)]
    output = tiny_run.start(("megacpp_mcore", "sample", *options), words, place).finish()
    generated = bytes(found["long"][0].tolist())
    _, text, after = output.partition(generated.decode(errors="replace").strip())
    assert text, output[-3000:]
    assert all(line.startswith("INFO:") for line in after.split("\n") if line.strip()), after  # patches are reverted


def drafts_of(prompt: int, text: list[int], ahead: torch.Tensor, drafts: int) -> dict[str, int]:
    """Return the expected speculative-decoding counts for ``text``; ``ahead [depth, row]``: each depth's predictions."""
    rows, length, counts = prompt, prompt + 1, {"calls": 1, "drafted": 0, "accepted": 0}
    while length < len(text):
        drafted, right = drafts * (length - rows <= 12), 0  # LONGEST_REPEAT
        while right < drafted and length + right < len(text) and ahead[right, length - 2] == text[length + right]:
            right += 1
        if right == drafted:
            rows = length + drafted
        length += right + 1
        counts = {name: counts[name] + more for name, more in zip(counts, (1, drafted, right), strict=True)}
    return counts


def test_speculative_decoding_gives_the_same_tokens(found: dict[str, Any]) -> None:
    shares = []
    for prompt, drafts, plain, drafted, counts, ahead in found["speculative"]:
        assert torch.equal(plain, drafted)
        assert counts == drafts_of(prompt, plain[0].tolist(), ahead, drafts)
        shares.append(counts["accepted"] / max(counts["drafted"], 1))  # none, where the first token is the end
    assert max(shares) > 0.9
    assert min(shares) < 0.1
    assert any(0.1 < share < 0.9 for share in shares), shares
    for message, named in zip(found["refused"][:4], ("do_sample", "a batch", "padding", "drafts=0 of 1 depths"), strict=True):
        assert f"does not support {named};" in message


def test_what_the_layers_do_not_have_is_refused_and_hidden_states_are_there(found: dict[str, Any]) -> None:
    shapes = ("[1, 0]", "[0, 64]", "[64]", "zeros between", "[1, 4]; expected [1, 5]", "'AE'")
    named = ("position_ids", "passed as kept", shapes[0], "output_attentions", *shapes[1:])
    for message, values in zip(found["refused"][4:], named, strict=True):
        assert values in message
    count, by_the_last, first = found["states"]
    assert count == tiny_run.model().depth + 1
    assert torch.equal(by_the_last, first)


def test_the_speed_of_decoding_is_printed(bridge_python: Path, exported: Path) -> None:
    words = ("examples.decoding_speed", str(exported), "--tokens", "6", "--prompt", "def ", "a", "--drafts", "1", "2")
    done = run(bridge_python, *words)
    plain, *others = done.stdout.splitlines()
    assert re.fullmatch(r"0 drafts a call: [0-9.]+ tokens/s", plain), done.stderr[-3000:]
    assert [line[0] for line in others] == ["1", "2"]
    for line in others:
        assert re.search(r"tokens/s; \d+ of [1-9]\d* drafts accepted; same tokens for 2 of 2 prompts$", line)


def test_import_is_the_inverse(command: Command, exported: Path, place: Path, megatron: dict[str, torch.Tensor]) -> None:
    command("import", exported, place / "imported")
    command("export", place / "imported", place / "again", "--shard-bytes", "1000000")
    assert_same_bytes(stored(exported), stored(place / "again"))
    assert len(list((place / "again").glob("model-*.safetensors"))) > 1
    command("export", place / "imported", place / "third")
    check_files(exported, place / "third")
    data = ("--data-path", str(place / "text"), "--split", "90,10,0")
    words = ("--load", str(place / "imported"), "--finetune", "--save", str(place / "hybrid"), "--save-interval", "1")
    words = stock.words(tiny_run.model(), *words, data=data, model_class=HYBRID, global_batch_size=2, train_iters=1)
    tiny_run.start(LAUNCH, [*words, "--lr", "0", "--min-lr", "0"], place).finish()
    command("export", place / "hybrid", place / "fourth")
    before, after = (
        {name: value for name, value in stored(folder).items() if "e_score_correction_bias" not in name}
        for folder in (exported, place / "fourth")
    )
    assert_same_bytes(before, after)  # balance moves the biases
    (place / "fourth" / "model.safetensors").write_bytes(b"\0" * 64)  # which transformers would take first
    assert "fourth/model.safetensors cannot be read" in command("import", place / "fourth", place / "none", status=2)
    loaded = megatrons(place, place / "imported", "--finetune")
    vocabulary = slice(tiny_run.model().vocab_size)  # rows that pad it are zeros now
    assert torch.equal(loaded["logits"][..., vocabulary], megatron["logits"][..., vocabulary])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", [Layout(tensor=2, sequence_parallel=True, expert=2), Layout(pipeline=2)], ids=["TP 2, EP 2", "PP 2"]
)
def test_the_layout_does_not_show(command: Command, exported: Path, place: Path, tmp_path: Path, layout: Layout) -> None:
    converted = ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path / "saved")]
    weights = ["--load", str(place / "saved"), "--no-load-optim", "--no-load-rng", "--no-save-optim", *converted]
    words = tiny_run.words(place, 3, *weights, layout=layout)
    status, output = launch(["--", *words], place / "config.yaml", 2)
    assert status == 0, output[-3000:]
    command("export", tmp_path / "saved" / "torch_dist", tmp_path / "exported")
    check_files(exported, tmp_path / "exported")


def check_files(exported: Path, other: Path) -> None:
    for path in (path for path in exported.iterdir() if path.name not in ("README.md", "receipt.json")):
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an export, read without the library, which this process does not have."""
    values = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                assert entry["dtype"] == "F32"
                data = bytearray(content[8 + size + first : 8 + size + last])
                values[name] = torch.frombuffer(data, dtype=torch.float32).view(entry["shape"])
    return values


def test_what_save_pretrained_wrote_is_imported(command: Command, found: dict[str, Any], exported: Path, place: Path) -> None:
    command("import", f"{exported}_saved", place / "from_saved")
    command("export", place / "from_saved", place / "saved_again")
    assert found["parameters"] == sum(value.numel() for value in stored(exported).values())
    assert_same_bytes(stored(exported), stored(place / "saved_again"))


def test_bridge_takes_it_to_a_checkpoint_and_back(
    bridge_python: Path, command: Command, exported: Path, place: Path, tmp_path: Path
) -> None:
    words = map(str, (exported, tmp_path / "back", tmp_path / "checkpoint"))
    run(bridge_python, "tests.bridge.auto_bridge", *words, MEGACPP_CONFIG=str(place / "config.yaml"))
    command("export", tmp_path / "checkpoint", tmp_path / "ours")
    for folder in (tmp_path / "back", tmp_path / "ours"):
        assert_same_bytes(stored(exported), stored(folder))
    command("import", tmp_path / "back", tmp_path / "imported")
    assert (tmp_path / "back" / "modeling_nam56r.py").read_bytes() == (exported / "modeling_nam56r.py").read_bytes()


@pytest.mark.parametrize("split", ["tensor expert", pytest.param("pipeline", marks=pytest.mark.exhaustive)])
def test_bridge_takes_it_through_two_processes(
    bridge_python: Path, exported: Path, place: Path, tmp_path: Path, split: str
) -> None:
    words = ("-m", "tests.bridge.auto_bridge", str(exported), str(tmp_path / "back"))
    variables = {"MEGACPP_CONFIG": str(place / "config.yaml"), "SPLIT": split}
    status, output = forks.run_ranks(words, 2, python=str(bridge_python), megatron=True, **variables)
    assert status == 0, output[-3000:]
    assert_same_bytes(stored(exported), stored(tmp_path / "back"))


WEIGHTS, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    (lambda folder: os.truncate(folder / WEIGHTS, 5000), WEIGHTS),
    (lambda folder: flip(folder / WEIGHTS, -1), f"{WEIGHTS} is not what was exported"),
    (lambda folder: edit(folder / INDEX, sha256={"x": ""}), "is not what was exported"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: edit(folder / "config.json", index_topk=7), "index_topk is 7"),
    (lambda folder: edit(folder / INDEX, weight_map=["x"]), "weight_map"),
]
"""Of an export, and what its import says."""
OTHERS = {
    "mamba3: {a_floor: 0.5}": "mamba3.a_floor is 0.0001, expected 0.5",
    "moe: {topk: 1}": "moe_router_topk is 2, expected 1",
    "rope_theta: 10000": "rotary_base is 500000, expected 10000",
}
"""Overrides of another model, which no tensor shows."""


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_is_damaged_of_another_model_or_impossible_is_named(
    bridge_python: Path, exported: Path, place: Path, tmp_path: Path
) -> None:
    """Every command in one process; each leaves nothing."""
    config, new, cases = (place / "config.yaml").read_text(), tmp_path / "new", []
    for number, (damage, named) in enumerate(DAMAGES):
        damage(shutil.copytree(exported, folder := tmp_path / f"damaged{number}"))
        cases.append((["import", folder, new], config, named))
    for override, named in OTHERS.items():
        cases.append((["export", place / "saved", new], f"{config}  {override}\n", named))
    shutil.copytree(place / "saved", tmp_path / "saved")
    (shard,) = (tmp_path / "saved").glob("iter_*/*.distcp")
    os.truncate(shard, 1000)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    cases += [
        (["export", place / "saved", exported], config, str(exported)),  # exists
        (["export", place / "saved", new], "model: nam56r_tiny\n", "core_attention.indexer"),  # another schedule
        (["export", place / "saved", new, "--tokenizer", place], config, "tokenizer.json"),  # has none
        (["export", place / "saved", new, "--tokenizer", tmp_path], config, "tokenizer.json"),
        (["export", place / "saved", new, "--shard-bytes", 0], config, "bytes"),
        (["export", tmp_path / "saved", new], config, shard.name),
    ]
    commands = []
    for number, (words, settings, _) in enumerate(cases):
        (tmp_path / f"{number}.yaml").write_text(settings)
        commands.append([f"MEGACPP_CONFIG={tmp_path}/{number}.yaml", "checkpoint", *words, "--model", "nam56r_tiny"])
    for (words, _, named), (status, output, _) in zip(cases, outcomes(bridge_python, CLI, commands), strict=True):
        assert (status, named in output) == (2, True), (words, output)
    assert not list(tmp_path.glob("new*"))


def test_the_example_of_transformers_learns(bridge_python: Path) -> None:
    done = run(bridge_python, "examples.ops_transformers", "--steps", "4")
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(losses) == 4, done.stderr
    assert losses == sorted(losses, reverse=True)
