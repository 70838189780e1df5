"""Writes a checkpoint as a folder that ``transformers.AutoModelForCausalLM.from_pretrained`` reads, one shard at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import megacpp_mcore
from megacpp_mcore.arguments import lowering
from megacpp_mcore.checkpoints import layout
from megacpp_mcore.checkpoints.folder import newest_iteration
from megacpp_mcore.checkpoints.integrity import read_common, read_metadata
from megacpp_mcore.checkpoints.staging import new_folder
from megacpp_mcore.data.tokenizer import BYTE_COUNT, BYTE_SPECIALS, BYTE_VOCAB_SIZE, ByteTokenizer, folder_checksum
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.huggingface.names import Tensor, configuration, tensors
from megacpp_mcore.model import Model, hybrid
from megacpp_mcore.util.files import sha256_of

INDEX = "model.safetensors.index.json"
DIGESTS = "sha256"
"""Key in the index of the digests of its files. Bridge copies the index's ``metadata`` to other weights, and no other key."""
CODE = ("configuration_nam56r.py", "modeling_nam56r.py")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip


def export(checkpoint: Path, folder: Path, model: Model, tokenizer: Path | None, shard_bytes: int) -> Path:
    """Write the weights of ``checkpoint``, of any layout in the format torch_dist, to the new ``folder``.

    Needs memory for one shard, and no GPU. The tensors keep their dtypes; rows that pad the vocabulary are left out. Returns
    the checkpoint's folder of one iteration.

    Args:
        checkpoint: the folder of ``--save``, for its latest checkpoint, or an iter_… folder in it.
        tokenizer: a Hugging Face tokenizer's folder; None: the byte tokenizer, if the model's vocabulary is bytes.
        shard_bytes: maximum size of a file, 1 or more, unless a single tensor is larger.

    Raises:
        CheckpointError: ``folder`` exists; the checkpoint is missing, damaged, or of another model; the tokenizer is not in its
            folder, or not that of the run by its receipt; safetensors is not installed. Nothing is left behind.
    """
    library = safetensors()
    source = newest_iteration(checkpoint)
    reader = _Reader(source)
    wanted = list(tensors(model))
    stored: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    _check(source, model, wanted, stored)
    _check_trained(source, model, read_common(source, reader.read_metadata()))
    files, receipt = tokenizer_files(model, tokenizer), source.parent / "observe" / "receipt.json"
    _check_tokenizer(receipt, tokenizer)
    with new_folder(folder) as unfinished:
        shards, size = list(_shards(wanted, stored, shard_bytes)), 0
        places: dict[str, str] = {}
        digests: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            entries = {tensor.key: stored[tensor.key] for tensor in shard}
            state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
            load(state, storage_reader=reader, no_dist=True)
            values = {tensor.name: state[tensor.key][: tensor.shape[0]].contiguous() for tensor in shard}
            size += sum(value.nbytes for value in values.values())
            library.save_file(values, str(unfinished / name), metadata={"format": "pt"})
            (unfinished / name).chmod(0o644)
            places |= dict.fromkeys(values, name)
            digests[name] = sha256_of(unfinished / name)
        _write_json(unfinished / INDEX, {"metadata": {"total_size": size}, DIGESTS: digests, "weight_map": places})
        widest = stored["output_layer.weight"].properties.dtype
        ids = _special_ids(files)
        dtype = {"dtype": str(widest).removeprefix("torch."), "megacpp_mcore": megacpp_mcore.__version__}
        _write_json(unfinished / "config.json", configuration(model) | dtype | ids)
        _write_json(unfinished / "generation_config.json", {"_from_model_config": True, **ids})
        for name in CODE:
            shutil.copyfile(Path(__file__).with_name(name), unfinished / name)
        for name, content in files.items():
            (unfinished / name).write_text(content, encoding="utf-8")
        if receipt.is_file():
            shutil.copyfile(receipt, unfinished / "receipt.json")
        (unfinished / "README.md").write_text(_card(model, source, receipt.is_file()), encoding="utf-8")
    return source


class _Reader(FileSystemReader):
    """A reader that runs no code from the checkpoint's metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def _check(folder: Path, model: Model, wanted: Sequence[Tensor], stored: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not those of ``model``."""
    if "model.decoder.final_layernorm.weight" in stored:
        raise CheckpointError(
            f"{folder} is in the format torch_dcp; load it once and save it in torch_dist (--ckpt-convert-format torch_dist "
            "--ckpt-convert-save NEW), then export NEW/torch_dist"
        )
    keys = {tensor.key for tensor in wanted}
    prefixes = ("decoder.", "embedding.", "output_layer.", "mtp.")
    extra = [key for key, entry in stored.items() if key.startswith(prefixes) and isinstance(entry, TensorStorageMetadata)]
    wrong = [f"{key} is missing" for key in keys - stored.keys()] + [f"{key} is not its" for key in set(extra) - keys]
    for tensor in wanted:
        if (entry := stored.get(tensor.key)) is None:
            continue
        rows, *rest = entry.size
        if rest != list(tensor.shape[1:]) or rows < tensor.shape[0] or (rows > tensor.shape[0] and not tensor.rows_may_follow):
            wrong.append(f"{tensor.key} has the shape {list(entry.size)}, expected {list(tensor.shape)}")
    if wrong:
        raise CheckpointError(
            f"{folder} is not a checkpoint of {model.name}: {'; '.join(sorted(wrong)[:3])}"
            f"{f', and {len(wrong) - 3} more' if len(wrong) > 3 else ''}; name the model that was trained, by MEGACPP_CONFIG "
            "if not a preset"
        )


def _check_trained(folder: Path, model: Model, common: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a run whose model differs from ``model`` in settings that no tensor shows."""
    saved = dict(common.get("content_metadata", {}).get(layout.MODEL_KEY, {}))
    expected = layout.recorded(model)
    arguments = common.get("args")
    # Until the first step.
    unset = set() if getattr(arguments, "group_query_attention", False) else {"num_query_groups"}
    text, of_gpt = getattr(arguments, "hybrid_layer_pattern", None), lowering.model_arguments(model)
    for argument in lowering.model_arguments(model, lowering.model_class_of(arguments)):
        if argument not in of_gpt:  # HybridModel's pattern sets it, in no argument
            continue
        if hasattr(arguments, argument.field) and argument.field not in unset:
            saved[argument.field], expected[argument.field] = getattr(arguments, argument.field), argument.expected
    wrong = [
        f"{name} is {value!r}, expected {expected.get(name)!r}"
        for name, value in saved.items()
        if not lowering.same(value, expected.get(name))
    ]
    wrong += [] if text is None else hybrid.contradictions(model, text)
    if wrong:
        raise CheckpointError(
            f"{folder} is of a run of another model than {model.name}: {'; '.join(wrong)}; name the model that was trained, "
            "by MEGACPP_CONFIG if not a preset"
        )


def _shards(wanted: Sequence[Tensor], stored: Mapping[str, Any], max_bytes: int) -> Iterator[list[Tensor]]:
    """Split the tensors into shards of at most ``max_bytes``."""
    shard: list[Tensor] = []
    size = 0
    for tensor in wanted:
        entry = stored[tensor.key]
        tensor_bytes = entry.size.numel() * entry.properties.dtype.itemsize
        if shard and size + tensor_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor_bytes
    yield shard


def tokenizer_files(model: Model, folder: Path | None) -> dict[str, str]:
    """Return a tokenizer's files by name: those in ``folder``, or the byte tokenizer's.

    Raises:
        CheckpointError: the folder has no tokenizer.json, or one that does not fit the model; or none is named, and the
            model's tokens are not bytes.
    """
    if folder is None:
        if model.vocab_size != BYTE_VOCAB_SIZE:
            raise CheckpointError(
                f"{model.name} has {model.vocab_size} tokens, and no tokenizer is named; pass --tokenizer FOLDER, the one that "
                f"`data prepare` took (bytes have {BYTE_VOCAB_SIZE})"
            )
        return _byte_tokenizer()
    try:
        files = {name: (folder / name).read_text(encoding="utf-8") for name in TOKENIZER if (folder / name).is_file()}
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}; expected a Hugging Face tokenizer's files, in UTF-8") from error
    if "tokenizer.json" not in files:
        raise CheckpointError(
            f"{folder} has no tokenizer.json; expected a Hugging Face tokenizer's folder, or, for bytes, no --tokenizer"
        )
    largest = max(_ids(files, str(folder)).values(), default=-1)
    if not 0 <= largest < model.vocab_size:
        raise CheckpointError(
            f"{folder} has ids up to {largest}, and {model.name} {model.vocab_size} tokens; name the tokenizer of its data"
        )
    return files


def _check_tokenizer(receipt: Path, folder: Path | None) -> None:
    """Refuse a tokenizer other than that of the run's receipt, if there is one and it names one."""
    try:
        trained = json.loads(receipt.read_text(encoding="utf-8"))["tokenizer"]["checksum"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    found = ByteTokenizer().checksum() if folder is None else folder_checksum(folder)
    if trained not in (None, found):
        raise CheckpointError(
            f"{folder or 'the byte tokenizer'} has the checksum {found[:12]}, and the run was trained on text of one of "
            f"checksum {trained[:12]} ({receipt}); pass --tokenizer FOLDER, the one that `data prepare` took"
        )


def _byte_tokenizer() -> dict[str, str]:
    """Return the files of the tokenizer that ``data prepare`` calls ``byte``: a byte-level BPE without merges."""
    # GPT-2's characters for bytes: printable Latin-1 ones are themselves, the rest follow from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printable else next(others)) for byte in range(BYTE_COUNT)]
    by_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token, number in BYTE_SPECIALS.items()
        ],
        "pre_tokenizer": by_level,
        "decoder": by_level,
        "model": {"type": "BPE", "vocab": {character: byte for byte, character in enumerate(characters)}, "merges": []},
    }
    named = {"eos_token": "<|eod|>", "bos_token": "<|bos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    dump = lambda value: json.dumps(value, indent=1, ensure_ascii=False) + "\n"  # noqa: E731
    return {"tokenizer.json": dump(tokenizer), "tokenizer_config.json": dump(config | named)}


def _ids(files: Mapping[str, str], where: str) -> dict[str, int]:
    """Return the id of every token of a tokenizer."""
    try:
        content = json.loads(files["tokenizer.json"])
        dict(json.loads(files.get("tokenizer_config.json", "{}")).items())
        vocab = content["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram's: tokens and their scores, by id
            vocab = {token: number for number, (token, _) in enumerate(vocab)}
        return vocab | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}: tokenizer.json or tokenizer_config.json is no tokenizer's: {error!r}") from error


def _special_ids(files: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of the special tokens that generation needs."""
    config, ids = json.loads(files.get("tokenizer_config.json", "{}")), _ids(files, "the tokenizer")
    special_ids = {}
    for name in ("bos", "eos", "pad"):
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in ids:
            special_ids[f"{name}_token_id"] = ids[token]
    return special_ids


def _card(model: Model, source: Path, has_receipt: bool) -> str:
    count = sum(model.parameters().values())
    facts = "`receipt.json` says how it was trained." if has_receipt else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {model.name}

A hybrid language model of {model.depth} layers (`{model.layers}`): A multi-head latent attention, E mixture of experts,
M Mamba-3, R M²RNN; {count:,} parameters. Exported from `{source.name}` by megacpp-mcore {megacpp_mcore.__version__}. {facts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
print(tokenizer.decode(model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50)[0]))
```
"""


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def safetensors() -> Any:
    """Return the module safetensors.torch.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors.torch as library
    except ImportError:
        raise CheckpointError("safetensors is not installed; pip install 'megacpp-mcore[huggingface]'") from None
    return library
