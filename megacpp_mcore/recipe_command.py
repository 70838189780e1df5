"""``megacpp-mcore recipe list|show|emit``: what the presets are, and the stock command that trains one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore import config
from megacpp_mcore.errors import DataError, LaunchError, ModelError
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import PRESETS, Layout, Model, preset

_DATA_VARIABLE = "${DATA_PREFIX:?set it to the prefix of a prepared dataset}"


def add_parser(subparsers: Any) -> None:
    """Add ``recipe`` to the command line."""
    parser = subparsers.add_parser(
        "recipe", help="list the models, show one, or print the stock command that trains it"
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="one line a model")
    show = actions.add_parser("show", help="the whole definition of a model, its layers and parameter counts, as JSON")
    show.add_argument("name")
    emit = actions.add_parser("emit", help="the complete stock Megatron command for a model")
    emit.add_argument("name")
    emit.add_argument(
        "--as", dest="form", choices=("cli", "args"), default="cli", help="a shell command, or one word a line"
    )
    emit.add_argument("--device", choices=("cuda", "cpu"), help="default: cpu for nam56r_tiny, cuda for the others")
    emit.add_argument("--impl", choices=("transformer_engine", "local"), help="default: local on cpu, else TE")
    for name in ("tensor", "pipeline", "virtual", "expert"):
        emit.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{name} parallelism")
    emit.add_argument("--sequence-parallel", action="store_true")
    emit.add_argument("--data", metavar="PREFIX", help="dataset prefix; default: the shell variable DATA_PREFIX")
    emit.add_argument(
        "--tokenizer", metavar="DIR", help="Hugging Face tokenizer folder; default: bytes or ids as they are"
    )
    emit.add_argument("--micro-batch-size", type=int, default=1)
    emit.add_argument("--global-batch-size", type=int, default=8)
    emit.add_argument("--train-iters", type=int, default=1000)
    emit.add_argument("--lr", type=float, default=3e-4)


def run(args: argparse.Namespace) -> int:
    """Carry out ``recipe``; returns the exit status."""
    if args.action == "list":
        for model in PRESETS.values():
            print(f"{model.name:<16} {_summary(model)}")
    elif args.action == "show":
        model, _ = chosen_model(args.name)
        described = dataclasses.asdict(model) | {
            "layers": model.layers,
            "attention_roles": {number: role for number, role in enumerate(model.roles, 1) if role},
            "parameters": model.parameters() | {"total": sum(model.parameters().values())},
        }
        print(json.dumps(described, indent=2))
    else:
        print(emit(args))
    return 0


def tokenizer_words(model: Model, folder: str | None = None, data: str | None = None) -> tuple[str, ...]:
    """Stock tokenizer arguments of a run.

    Args:
        model: what is trained.
        folder: a Hugging Face tokenizer folder; without one, the built-in bytes for a model of their vocabulary, and ids as
            they are for any other.
        data: prefix of the dataset, whose manifest then says what its end-of-document id is.
    """
    # Imported here: these bring numpy, which the command line starts without.
    from megacpp_mcore.data.manifest import load_manifest
    from megacpp_mcore.data.tokenizer import BYTE_VOCAB_SIZE, ByteTokenizer

    if folder is not None:
        return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)
    if model.vocab_size == BYTE_VOCAB_SIZE:
        return tuple(ByteTokenizer().stock_flags())
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size))
    if data is None or not os.path.exists(data + ".manifest.json"):
        return words
    eod = load_manifest(data).tokenizer["eod_id"]
    if eod is None:
        raise DataError(
            f"{data} was adopted without an end-of-document id, and Megatron's NullTokenizer needs one; say it with "
            f"`megacpp-mcore data verify --adopt --eod-id ID {data}`"
        )
    return (*words, "--null-tokenizer-eod-id", str(eod))


def chosen_model(name: str) -> tuple[Model, Path | None]:
    """The model a user means by ``name``, and the file of MEGACPP_CONFIG when it is that file's model.

    A file about another model is left out, with a line on standard error.
    """
    loaded = config.from_environment()
    if loaded is None:
        return preset(name), None
    if name in (loaded.preset, loaded.model.name):
        return loaded.model, loaded.path
    model = preset(name)
    print(
        f"note: {config.VARIABLE} names {loaded.path}, which is about {loaded.preset}; {name} is taken as it is",
        file=sys.stderr,
    )
    return model, None


def emit(args: argparse.Namespace) -> str:
    """The text ``recipe emit`` prints."""
    model, settings = chosen_model(args.name)
    if args.form == "args" and args.data is None:
        raise LaunchError(
            "recipe emit --as args prints words for a program, and has no prefix of a dataset to put among them; "
            "add --data PREFIX (--as cli leaves it to the shell variable DATA_PREFIX)"
        )
    if args.data is not None and not os.path.exists(args.data + ".idx"):
        print(f"note: there is no {args.data}.idx; the command needs a prepared dataset there", file=sys.stderr)
    device = args.device or ("cpu" if model.name == "nam56r_tiny" else "cuda")
    layout = Layout(
        tensor=args.tensor,
        pipeline=args.pipeline,
        virtual=args.virtual,
        expert=args.expert,
        sequence_parallel=args.sequence_parallel,
    )
    training = Training(
        device=device,
        precision="fp32" if device == "cpu" else "bf16",
        transformer_impl=args.impl or ("local" if device == "cpu" else "transformer_engine"),
        data=("--data-path", args.data or _DATA_VARIABLE, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, args.tokenizer, args.data),
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        train_iters=args.train_iters,
        learning_rate=args.lr,
    )
    words = lower(model, layout, training)
    if args.form == "args":
        return "\n".join(words)
    processes = math.lcm(layout.tensor, layout.expert) * layout.pipeline
    replicas = processes // (layout.tensor * layout.pipeline)
    if training.global_batch_size % (training.micro_batch_size * replicas):
        raise ModelError(
            f"the global batch of {training.global_batch_size} is not a multiple of the micro-batch "
            f"({training.micro_batch_size}) × {replicas} data-parallel replicas; change --global-batch-size"
        )
    return _shell(words, device, processes, settings)


def _shell(words: Sequence[str], device: str, processes: int, settings: Path | None) -> str:
    if device == "cpu":
        head = f"megacpp-mcore launch --device cpu --nproc {processes} -- pretrain_gpt.py"
    else:
        head = f"torchrun --nproc-per-node {processes} pretrain_gpt.py"
    lines: list[str] = []
    for word in words:
        quoted = f'"{word}"' if word == _DATA_VARIABLE else shlex.quote(word)
        if word.startswith("--"):
            lines.append(quoted)
        else:
            lines[-1] += " " + quoted
    prefix = "" if settings is None else f"{config.VARIABLE}={shlex.quote(str(settings.resolve()))} "
    return prefix + head + " \\\n  " + " \\\n  ".join(lines)


def _summary(model: Model) -> str:
    counts = ", ".join(f"{model.layers.count(letter)} {letter}" for letter in "AEMR" if letter in model.layers)
    total = sum(model.parameters().values()) / 1e9
    return (
        f"{model.depth} layers ({counts}), hidden {model.hidden_size}, {total:.4g} B parameters, MTP {model.mtp.depth}"
    )
