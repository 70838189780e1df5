"""Reading is the inverse of lowering: of every recipe, and of runs drawn at random."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.arguments.read import model_of, read
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import LaunchError, ModelError
from megacpp_mcore.model import PRESETS, Layout, preset, with_overrides
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import FIELDS, Execution, Run, usual_for
from megacpp_mcore.model.training import GPT, HYBRID, Training
from megacpp_mcore.settings import load
from tests.errors import raises
from tests.lanes import exhaustive_but

DATA = ("--data-path", "corpus", "--split", "100,0,0")


def described(run: Run) -> Run:
    """Return ``run`` as read back from its command line, where the spec names a preset."""
    model = run.model if run.model not in PRESETS.values() else None
    return read(lower(run), device=run.device, processes=run.training.processes, model=model)


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_from_its_command_line(name: str, model_class: str) -> None:
    run = dataclasses.replace(RECIPES[name].run, model_class=model_class)
    words = {"data": DATA, "tokenizer": tokenizer_words(RECIPES[name].model), "extra": ("--exit-interval", "7")}
    training = dataclasses.replace(run.training, **words, cuda_graphs=run.is_captured)
    run = dataclasses.replace(run, training=training)
    assert described(run) == run
    assert lower(described(run)) == lower(run)


def drawn(seed: int) -> Run:
    """A run that can be lowered: sizes, stages, layout, training, and execution."""
    draw = random.Random(seed)
    while True:
        overrides: dict[str, Any] = {"dsa": {"schedule": draw.choice(("-", "F", "-F"))}} if draw.random() < 0.7 else {}
        overrides |= {"pattern": "AEMEA|EMEAEMR"} if draw.random() < 0.2 else {}
        overrides |= {"pattern": draw.choice(("AM", "AE", "R"))} if draw.random() < 0.2 else {}
        overrides |= {"mtp": {"depth": 0}} if draw.random() < 0.2 else {}
        sizes = {name: draw.choice((1, 1, 2, 4)) for name in ("tensor", "pipeline", "virtual", "expert", "context")}
        device = draw.choice(("cuda", "cuda", "cpu"))
        impl = draw.choice(("transformer_engine", "local")) if device == "cuda" else "local"
        try:
            model = with_overrides(preset(draw.choice(("nam56r", "nam56r_tiny", "nam52"))), overrides)
            layout = Layout(**sizes, sequence_parallel=sizes["tensor"] > 1)
            training = Training(
                device=device,
                precision=draw.choice(("bf16", "fp32", "bf16_te_fp8_experts")),
                transformer_impl=impl,
                data=draw.choice((DATA, ("--mock-data",))),
                tokenizer=tokenizer_words(model),
                micro_batch_size=draw.choice((1, 3)),
                global_batch_size=draw.choice((24, 96)),
                processes=layout.processes * draw.choice((1, 2, 3)),
                train_iters=draw.choice((1, 7, 400)),
                learning_rate=draw.choice((0.0, 3e-4, 0.0017)),
                weight_decay=draw.choice((0.1, 0.0)),
                adam_beta2=draw.choice((0.95, 0.999)),
                clip_grad=draw.choice((1.0, 0.5)),
                seed=draw.choice((1234, 7)),
                extra=draw.choice(((), ("--exit-interval", "7", "--no-save-optim"))),
            )
            run = Run(model, layout, training, draw.choice((GPT, HYBRID)))
            run = dataclasses.replace(run, asked=wanted(draw, run))
            captured = dataclasses.replace(run, training=dataclasses.replace(training, cuda_graphs=True))
            run = captured if captured.is_captured and draw.random() < 0.5 and "cuda_graph_impl" not in run.asked else run
            lower(run)
        except (ModelError, ValueError):
            continue
        return run


def wanted(draw: random.Random, run: Run) -> dict[str, Any]:
    """Draw some execution fields with values other than the defaults."""
    values: dict[str, Any] = {
        **{name: not field.default for name, field in FIELDS.items() if "words" in field.metadata},
        "moe_dispatcher": "flex", "bucket_elements": 5, "num_buckets": 3, "log_interval": 4, "fp8": "e4m3",
        "cuda_graph_impl": "full_iteration", "cuda_graph_scope": ("attn", "mlp"), "recompute_granularity": "selective",
        "recompute_modules": ("moe", "mlp"),
    }  # fmt: skip
    for name in ("megatron_fsdp", "fp16", *([] if run.has_moe else ["moe_dispatcher"])):
        del values[name]  # another class of states; another dtype than the plan's; nothing to dispatch
    chosen = {name: values[name] for name in draw.sample(sorted(values), draw.choice((0, 0, 1, 2, 4)))}
    usual = dataclasses.asdict(Execution()) | usual_for(dataclasses.replace(run, asked=chosen))
    return {name: value for name, value in chosen.items() if value != usual[name]}


@pytest.mark.parametrize("start", exhaustive_but(range(0, 200, 50), 0, 50))
def test_runs_drawn_at_random_are_read_from_their_command_lines(start: int) -> None:
    seen = set()
    for seed in range(start, start + 50):
        run = drawn(seed)
        assert described(run) == run, seed
        assert lower(described(run)) == lower(run), seed
        seen |= {run.model_class, run.device, run.training.precision, *run.asked, run.layout.pipeline}
    assert {GPT, HYBRID, "cuda", "cpu", "bf16_te_fp8_experts", 1, 2} <= seen
    assert len(seen & FIELDS.keys()) > 10


def test_what_the_words_cannot_say_is_refused_or_left_out() -> None:
    with raises(LaunchError, "--lr", "'fast'"):
        read(["--lr", "fast"], device="cuda", processes=1, model=preset("nam56r"))
    for words in (["--seed", "0"], ["--clip-grad", "-1"], ["--lr", "nan"]):
        with pytest.raises((LaunchError, ModelError), match=f"^{words[0]} is"):
            read(words, device="cuda", processes=1, model=preset("nam56r"))
    alone = read(["--num-experts", "4", "--sequence-parallel"], device="cuda", processes=1)
    assert (alone.model, alone.has_moe, alone.layout, alone.families) == (None, True, Layout(), "")
    assert not read(["--transformer-impl", "inference_optimized"], device="cuda", processes=1).has_engine
    with raises(ModelError, "no model of this package"):
        lower(alone)


def test_a_model_travels_by_name_and_is_checked(tmp_path: Path) -> None:
    class Source:
        megacpp_preset = "nam56r_tin"

    with raises(ModelError, "'nam56r_tin'", "'nam56r_tiny'"):
        model_of([Source()], None, "nam56r_tiny")
    file = tmp_path / "mine.yaml"
    file.write_text("model: nam56r_tiny\noverrides: {name: mine}\n")
    with raises(ModelError, "nam52", file, "nam56r_tiny"):
        model_of([], load(file), "nam52")
