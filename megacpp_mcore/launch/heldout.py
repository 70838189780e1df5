"""Loads a trained model as stock Megatron does, with the tokenizer of its text, and computes the nats of held-out tokens.

A text is cut into contiguous windows of the model's sequence length. Each token is predicted from the tokens before it *in
its window*: every token but the very first is predicted exactly once, none with more context than the model has.
Checked with megatron-core 0.19.2.

Shapes: W windows, S sequence length, N tokens.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacpp_mcore.checkpoints.folder import RELEASE, read_tracker
from megacpp_mcore.data.index import read_index
from megacpp_mcore.data.manifest import Manifest, verify
from megacpp_mcore.data.score import BitsPerByte, byte_counts
from megacpp_mcore.data.tokenizer import BYTE_EOD_ID, ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from megacpp_mcore.errors import DataError, LaunchError
from megacpp_mcore.util import console


@dataclass(frozen=True)
class Windows:
    """Contiguous windows: ``labels_WS[w, s]`` is the token after ``inputs_WS[w, s]``; ``mask_WS`` is 0 on padding."""

    inputs_WS: NDArray[np.int64]
    labels_WS: NDArray[np.int64]
    mask_WS: NDArray[np.bool_]


def cut_windows(tokens_N: NDArray[Any], sequence: int) -> Windows:
    """Cut N tokens into windows in which each token but the first is a label exactly once; the last one is padded.

    Raises:
        DataError: fewer than two tokens.
    """
    if len(tokens_N) < 2:
        raise DataError(f"found {len(tokens_N)} tokens; expected at least 2, one to predict the other from")
    predicted = np.ones(len(tokens_N) - 1, dtype=np.bool_)
    inputs, labels, mask = (
        np.pad(values, (0, -len(values) % sequence)).reshape(-1, sequence)
        for values in (tokens_N[:-1], tokens_N[1:], predicted)
    )
    return Windows(inputs.astype(np.int64), labels.astype(np.int64), mask)


def tokenizer_of(args: Namespace) -> Tokenizer:
    """Return the tokenizer of a run with Megatron's ``args``.

    Raises:
        DataError: its ids cannot be turned into text.
    """
    if args.tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(args.tokenizer_model)
    if args.tokenizer_type == "NullTokenizer" and args.null_tokenizer_eod_id == BYTE_EOD_ID:
        return ByteTokenizer()
    raise DataError(
        f"the model's tokens are those of --tokenizer-type {args.tokenizer_type} --tokenizer-model {args.tokenizer_model}; "
        "expected bytes (`data prepare` without --tokenizer) or a Hugging Face folder (HuggingFaceTokenizer), which give text"
    )


def read_heldout(prefix: str, limit: int | None, tokenizer: Tokenizer | None = None) -> tuple[NDArray[Any], Manifest]:
    """Read the first ``limit`` tokens of a dataset (None: all), after checking it against its manifest, and return both.

    Raises:
        DataError: the dataset is damaged, or of another tokenizer (None: that of bytes).
    """
    manifest, tokenizer = verify(prefix), tokenizer or ByteTokenizer()
    if manifest.tokenizer["checksum"] != tokenizer.checksum():
        raise DataError(
            f"{prefix} was made with the tokenizer {manifest.tokenizer['kind']} of checksum "
            f"{str(manifest.tokenizer['checksum'])[:12]}; expected the model's, {tokenizer.kind} of "
            f"{tokenizer.checksum()[:12]}: prepare the text with it"
        )
    tokens_N = read_index(prefix).open_tokens()
    return tokens_N[:limit] if limit else tokens_N, manifest


def score_windows(
    model: Any, windows: Windows, batch: int, *, progress: bool = True, replica: int = 0, replicas: int = 1
) -> BitsPerByte:
    """Run the model over the windows of one replica, ``batch`` at a time, and sum its per-token losses in fp64.

    Prints progress. All replicas run the same number of windows, as their experts wait for one another; surplus windows are not
    counted. The score's bytes are correct for a byte model; for another tokenizer, add them to it.
    """
    import torch

    device = next(model.parameters()).device
    score = BitsPerByte()
    count, sequence = windows.inputs_WS.shape
    for start in range(0, count, batch * replicas):
        places = start + replica * batch + np.arange(batch)
        places = places[places < count] if replicas == 1 else places
        part = places % count
        inputs, labels = (torch.from_numpy(values[part]).to(device) for values in (windows.inputs_WS, windows.labels_WS))
        positions = torch.arange(sequence, device=device).expand(len(inputs), sequence)
        with torch.no_grad():
            nats_BS = model(inputs, positions, None, labels=labels)
        mask_BS = windows.mask_WS[part] & (places < count)[:, None]
        kept = nats_BS.double().cpu().numpy()[mask_BS]
        score.add(float(kept.sum()), int(byte_counts(windows.labels_WS[part][mask_BS]).sum()))
        if progress:
            console.say(f"scored {min(start + batch * replicas, count)} of {count} windows")
    return score


def parsed(add_options: Callable[[ArgumentParser], ArgumentParser]) -> Namespace:
    """Parse ``sys.argv`` as stock Megatron does, with a script's own options: of a checkpoint only the weights are loaded."""
    from megatron.training.arguments import parse_and_validate_args

    return parse_and_validate_args(add_options, args_defaults={"no_load_optim": True, "no_load_rng": True})


def load_model(args: Namespace, *, in_replicas: bool = False) -> Any:
    """Build the model and load its newest checkpoint through stock Megatron; return it, unwrapped, in evaluation mode.

    Raises:
        LaunchError: no checkpoint was loaded; the run has more than one process, or with ``in_replicas`` pipeline
            stages or context parallelism.
    """
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model
    from megatron.training import argument_utils
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import setup_model_and_optimizer

    if args.world_size != 1 and not in_replicas:
        raise LaunchError(f"this runs in {args.world_size} processes; expected 1, which loads the checkpoint of any layout")
    for dimension, what in (("pipeline_model", "pipeline stages"), ("context", "context-parallel ranks")):
        if (size := getattr(args, f"{dimension}_parallel_size")) > 1:
            raise LaunchError(
                f"this runs in {size} {what}; expected 1: leave --{dimension.replace('_', '-')}-parallel-size out, as the "
                "checkpoint of any layout can be loaded"
            )
    initialize_megatron()
    args.skip_train, args.finetune = True, False  # no optimizer, and the checkpoint's own step, whatever the words say
    is_hybrid = args.hybrid_layer_pattern is not None
    config = (argument_utils.hybrid_config_from_args if is_hybrid else argument_utils.gpt_config_from_args)(args)
    (model,), _, _ = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=argument_utils.pretrain_cfg_container_from_args(args, config),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    if not args.iteration and not (args.load and read_tracker(Path(args.load)) == RELEASE):
        raise LaunchError(f"no checkpoint was loaded from --load {args.load}; expected one with trained weights")
    return unwrap_model(model).eval()
