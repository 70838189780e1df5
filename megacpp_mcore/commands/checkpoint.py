"""``megacpp-mcore checkpoint``: for another DSA schedule, longer rows, or Hugging Face's formats and back; imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacpp_mcore.util.flags import positive

if TYPE_CHECKING:
    from megacpp_mcore.model import Model


def add_parser(subparsers: Any) -> None:
    """Add ``checkpoint`` to the command line."""
    parser = subparsers.add_parser("checkpoint", help="export, import, or another DSA schedule")
    actions = parser.add_subparsers(dest="checkpoint_action", required=True, metavar="ACTION")
    words = "write OLD for another DSA schedule, or for a model of longer rows, to NEW; OLD stays as it is"
    schedule = actions.add_parser("schedule", help=words, description=words)
    old = "the folder of --save, for its latest checkpoint, or one iter_… in it"
    schedule.add_argument("old", metavar="OLD", help=old)
    schedule.add_argument("new", metavar="NEW", help="a folder that does not exist yet, for --load")
    schedule.add_argument("--model", required=True, help="a preset, or the model of the file that MEGACPP_CONFIG names")
    target = schedule.add_mutually_exclusive_group(required=True)
    target.add_argument("--schedule", help="one of - W F S for each A layer, tiled: -FSFF")
    successor = "the model to continue as: a preset such as nam56r_long, or a settings file"
    target.add_argument("--to", metavar="MODEL", help=successor)
    words = "write the weights of CHECKPOINT, of any layout, as safetensors with a model for transformers to FOLDER"
    export = actions.add_parser("export", help=words, description=words)
    export.add_argument("old", metavar="CHECKPOINT", help=old)
    export.add_argument("new", metavar="FOLDER", help="a folder that does not exist yet")
    export.add_argument("--tokenizer", metavar="FOLDER", help="a Hugging Face tokenizer (default: bytes)")
    most = "maximum size of a file (default: 4000000000)"
    export.add_argument("--shard-bytes", type=positive, default=4 * 10**9, metavar="N", help=most)
    words = "write the weights in an exported FOLDER to CHECKPOINT, for --load and --finetune; the optimizer is new"
    load = actions.add_parser("import", help=words, description=words)
    load.add_argument("old", metavar="FOLDER", help="an exported folder, or what save_pretrained wrote")
    load.add_argument("new", metavar="CHECKPOINT", help="a folder that does not exist yet, for --load")
    for sub in (export, load):
        sub.add_argument("--model", required=True, help="a preset, or the model of the file that MEGACPP_CONFIG names")


_MAY_CHANGE = (
    "name", "seq_length", "mla.window_size", "mla.yarn", "dsa.schedule", "dsa.topk", "dsa.warmup_steps", "mtp.attention",
)  # fmt: skip
"""Values of a definition that differ between a model and the one that it continues as."""


def _check_fits(old: Model, new: Model) -> None:
    """Refuse to continue training ``old`` as ``new`` if they are different models, even with the same tensors."""
    from megacpp_mcore.errors import CheckpointError

    before, after = (_values(dataclasses.asdict(model)) for model in (old, new))
    for name in before | after:
        if name not in _MAY_CHANGE and before.get(name) != after.get(name):
            raise CheckpointError(
                f"{name} is {before.get(name)} in {old.name}, and {after.get(name)} in {new.name}; expected the same (what may "
                f"change: {', '.join(_MAY_CHANGE)}): give --to a settings file about {new.name} with it, or leave it out"
            )


def _values(record: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a definition by name, those of its parts as ``part.name``."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}.{inner}": leaf for inner, leaf in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def run(args: argparse.Namespace) -> int:
    """Run ``checkpoint`` and return the exit status."""
    from megacpp_mcore.commands.recipe import chosen_model

    old, new, model = Path(args.old), Path(args.new), chosen_model(args.model)[0]
    if args.checkpoint_action == "export":
        from megacpp_mcore.huggingface.export import export

        source = export(old, new, model, args.tokenizer and Path(args.tokenizer), args.shard_bytes)
        print(f"{new}: {source} for transformers (trust_remote_code=True)")
        return 0
    if args.checkpoint_action == "import":
        from megacpp_mcore.huggingface.load import load

        print(f"{load(old, new, model)}: for --load and --finetune; the run begins at step 0")
        return 0
    from megacpp_mcore import settings
    from megacpp_mcore.checkpoints.schedule import reschedule

    longer, file = None, ""
    if args.to and Path(args.to).is_file():
        longer, file = settings.load(args.to).model, f"{settings.VARIABLE}={args.to} "
    elif args.to:
        longer = chosen_model(args.to)[0]
    if longer:
        _check_fits(model, longer)
    done = reschedule(old, new, model, longer.dsa.schedule if longer else args.schedule)
    lost = ", ".join(map(str, done.lost)) or "none"
    full = ", ".join(f"{layer} (as {source})" for layer, source in done.became_full.items()) or "none"
    print(f"{done.folder}: layers that lost their indexer: {lost}; that became Full: {full}")
    if longer:
        print(
            f"`{file}megacpp-mcore recipe emit {longer.name} -- --load {new} --finetune` begins at step 0 with rows of "
            f"{longer.seq_length} tokens; with --set dsa.warmup_steps=N the indexers first learn from dense attention over them"
        )
        return 0
    print(f"its definition (MEGACPP_CONFIG) needs, under overrides: dsa: {{schedule: '{args.schedule}'}}")
    return 0
