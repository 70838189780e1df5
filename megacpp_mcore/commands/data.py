"""The command ``megacpp-mcore data``: prepare, verify, tokenizer, corpus and score-unigram; no torch at import."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any

from megacpp_mcore.errors import DataError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``data`` to the subparsers of ``megacpp-mcore`` and return its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser("data", help="prepare, check and score training data")
    actions = parser.add_subparsers(dest="data_action", required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="tokenize text files into Megatron's .bin and .idx")
    tokenizer = actions.add_parser("tokenizer", help="train a byte-level BPE on text files")
    for action in (prepare, tokenizer):
        action.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, or folders to search")
        names = "names to take from folders instead of text, JSON lines, Parquet"
        action.add_argument("--glob", action="append", default=[], help=names)
        key = "key of the text in JSON lines, or column of Parquet (default: text)"
        action.add_argument("--json-key", default="text", metavar="KEY", help=key)
    tokenizer.add_argument("--output", required=True, metavar="DIR", help="a folder that does not exist yet")
    tokenizer.add_argument("--vocab-size", type=int, default=32768, help="number of ids (default: 32768)")
    add = prepare.add_argument
    add("--output", required=True, metavar="PREFIX", help="path of the dataset without suffix")
    add("--tokenizer", default="byte", metavar="byte|DIR", help="bytes, or a local Hugging Face folder (default: byte)")
    add("--split", metavar="NAME=SHARE,...", help="such as train=0.98,valid=0.02; writes PREFIX_NAME for each")
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    add("--overwrite", action="store_true", help="replace existing datasets")
    errors = "what to do with text that cannot be decoded: stop, or list it in the manifest (default: strict)"
    add("--errors", choices=("strict", "skip"), default="strict", help=errors)
    words = "check datasets against their manifests; lists all problems and then exits with 1"
    verify = actions.add_parser("verify", help=words)
    add = verify.add_argument
    add("prefixes", nargs="+", metavar="PREFIX", help="paths of datasets without suffix")
    add("--adopt", action="store_true", help="write a manifest for datasets that another tool made")
    add("--tokenizer", metavar="byte|DIR", help="with --adopt: the tokenizer that made them")
    add("--vocab-size", type=int, help="with --adopt: the vocabulary size, where it is known")
    add("--eod-id", type=int, help="with --adopt: the id that ends every document, where there is one")
    corpus = actions.add_parser("corpus", help="make a small corpus from Python's own standard library")
    add = corpus.add_argument
    add("--output", required=True, metavar="DIR", help="folder for stdlib_train and stdlib_heldout")
    add("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    add("--overwrite", action="store_true", help="replace an existing corpus")
    score = actions.add_parser("score-unigram", help="unigram entropy of a byte dataset, in bits per byte")
    score.add_argument("prefix", metavar="PREFIX", help="path of the dataset without suffix")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run ``data`` and return the exit status.

    Raises:
        DataError: it cannot be done; the message says why.
    """
    actions = {
        "prepare": _prepare, "verify": _verify, "tokenizer": _tokenizer, "corpus": _corpus, "score-unigram": _score_unigram,
    }  # fmt: skip
    return actions[args.data_action](args)


def _prepare(args: argparse.Namespace) -> int:
    from megacpp_mcore.data.prepare import prepare

    prefixes = prepare(
        args.inputs,
        args.output,
        tokenizer=args.tokenizer,
        split=args.split,
        globs=args.glob,
        workers=args.workers,
        overwrite=args.overwrite,
        skip_errors=args.errors == "skip",
        json_key=args.json_key,
    )
    _print_datasets(prefixes)
    _print_flags(args.tokenizer)
    return 0


def _tokenizer(args: argparse.Namespace) -> int:
    from megacpp_mcore.data.tokenizer import train

    trained = train(args.inputs, args.output, args.vocab_size, globs=args.glob, json_key=args.json_key)
    fewer = f" in place of {args.vocab_size}, as the text has no more pairs" if trained.vocab_size < args.vocab_size else ""
    print(f"{args.output}: {trained.vocab_size} ids{fewer}; {trained.eod_id} ends a document")
    _print_flags(args.output)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megacpp_mcore.data.manifest import adopt, verify
    from megacpp_mcore.data.tokenizer import ByteTokenizer, load_tokenizer

    if not args.adopt and (args.tokenizer, args.vocab_size, args.eod_id) != (None, None, None):
        raise DataError("--tokenizer, --vocab-size and --eod-id describe a manifest to be written: add --adopt, or remove them")
    prefixes, problems = list(dict.fromkeys(args.prefixes)), []
    for prefix in prefixes:
        if args.adopt:
            tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
            adopt(prefix, tokenizer=tokenizer, vocab_size=args.vocab_size, eod_id=args.eod_id)
        try:
            made_by = verify(prefix).tokenizer
            _print_datasets([prefix])
            if made_by["checksum"] == ByteTokenizer().checksum():
                _print_flags("byte")
            elif made_by["kind"] == "huggingface":
                print("stock flags: --tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR")
            if made_by["eod_id"] is None:
                print("its end-of-document id is not known and was not checked; adopt it with --eod-id to have it checked")
        except DataError as error:
            problems.append(error)
    if problems:
        print(f"datasets with problems: {len(problems)} of {len(prefixes)}", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in problems), file=sys.stderr)
    return 1 if problems else 0


def _corpus(args: argparse.Namespace) -> int:
    from megacpp_mcore.data.corpus import prepare_stdlib_corpus

    output = os.path.join(args.output, "stdlib")
    _print_datasets(prepare_stdlib_corpus(output, workers=args.workers, overwrite=args.overwrite))
    _print_flags("byte")
    return 0


def _score_unigram(args: argparse.Namespace) -> int:
    from megacpp_mcore.data.score import unigram_bits_per_byte

    print(f"{unigram_bits_per_byte(args.prefix):.6f}")
    return 0


def _print_datasets(prefixes: Any) -> None:
    from megacpp_mcore.data.manifest import load_manifest

    for prefix in prefixes:
        manifest = load_manifest(prefix)
        text = "" if manifest.text_bytes is None else f", {manifest.text_bytes} bytes of text"
        skipped = f", {len(manifest.skipped)} skipped (see the manifest)" if manifest.skipped else ""
        print(f"{prefix}: {manifest.documents} documents, {manifest.tokens} tokens of {manifest.dtype}{text}{skipped}")


def _print_flags(tokenizer: str) -> None:
    from megacpp_mcore.data.tokenizer import load_tokenizer

    print(f"stock flags: {shlex.join(load_tokenizer(tokenizer).stock_flags())}")
