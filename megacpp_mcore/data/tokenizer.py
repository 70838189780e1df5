"""Tokenizers that ``data prepare`` can use, each with the stock Megatron flags that agree with it; no torch.

``byte``: ids 0..255 are the bytes of the UTF-8 text itself, ids 256..259 the specials. Stock Megatron has no flag for a
byte tokenizer (its ``ByteLevelTokenizer`` cannot be named by ``--tokenizer-type``, and its end-of-document is byte 0),
and training only asks a tokenizer for its vocabulary size, its end-of-document id and its padding id. ``NullTokenizer``
takes all three from flags, so the two agree (megatron-core 0.19.2, ``core/tokenizers/utils/build_tokenizer.py``).

A folder: a Hugging Face "fast" tokenizer (``tokenizer.json``), read from disk and never from a hub.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megacpp_mcore.data.manifest import load_manifest, manifest_path
from megacpp_mcore.data.sources import JSON_KEY, cut_sources, find_sources, read_documents
from megacpp_mcore.errors import DataError
from megacpp_mcore.model import Model
from megacpp_mcore.util.files import replace

BYTE_COUNT = 256
BYTE_SPECIALS = {"<|eod|>": 256, "<|bos|>": 257, "<|pad|>": 258, "<|unk|>": 259}
BYTE_VOCAB_SIZE = BYTE_COUNT + len(BYTE_SPECIALS)
BYTE_EOD_ID = BYTE_SPECIALS["<|eod|>"]
BYTE_PAD_ID = BYTE_SPECIALS["<|pad|>"]
END = "<|endoftext|>"
"""The end-of-document token of tokenizers that are trained here."""

_HF_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class ByteTokenizer:
    """Bytes as tokens: ``encode`` is the identity on the UTF-8 bytes, so tokens and bytes are one count."""

    kind, vocab_size, eod_id = "byte", BYTE_VOCAB_SIZE, BYTE_EOD_ID

    def encode(self, text: bytes) -> NDArray[np.uint8]:
        """Return the bytes of ``text``, valid UTF-8, as ids, shape ``[len(text)]``; no specials are added."""
        return np.frombuffer(text, dtype=np.uint8)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without specials; a piece of a character becomes U+FFFD."""
        return bytes(one for one in ids if one < BYTE_COUNT).decode(errors="replace")

    def bytes_of(self, ids: Sequence[int]) -> int:
        """Count the bytes of text that ``ids`` represent; specials represent none."""
        return int((np.asarray(ids) < BYTE_COUNT).sum())

    def checksum(self) -> str:
        """Return a SHA-256 over everything that determines a text's ids: the vocabulary's description."""
        description = json.dumps({"bytes": BYTE_COUNT, "specials": BYTE_SPECIALS}, sort_keys=True)
        return hashlib.sha256(description.encode()).hexdigest()

    def stock_flags(self) -> list[str]:
        """Return ``NullTokenizer`` flags; stock then has vocabulary 260, end-of-document 256, padding 258."""
        ids = f"--null-tokenizer-eod-id {self.eod_id} --null-tokenizer-pad-id {BYTE_PAD_ID}"
        return f"--tokenizer-type NullTokenizer --vocab-size {self.vocab_size} {ids}".split()


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer in a local folder, read with the ``tokenizers`` package.

    The vocabulary size counts added tokens, as ``len(AutoTokenizer)`` does, and the end-of-document id is that of
    ``eos_token`` in ``tokenizer_config.json``: what stock's ``HuggingFaceTokenizer`` uses.

    Raises:
        DataError: the folder has no ``tokenizer.json``, names no ``eos_token``, has ids that are not below its number of
            tokens, or ``tokenizers`` is not installed.
    """

    kind = "huggingface"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"tokenizer folder {self.folder} has no tokenizer.json; expected a Hugging Face 'fast' tokenizer saved with "
                "save_pretrained(). Nothing is fetched from a hub: download or convert it first"
            )
        tokenizers = _tokenizers(f"reading {path}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))  # which contacts no hub
        except Exception as error:  # the package raises bare Exception for every malformed file
            raise DataError(f"{path} is not a tokenizer that 'tokenizers' {tokenizers.__version__} reads: {error}") from error
        # A saved truncation or padding is for the texts that it was saved with; transformers ignores both, too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= self.vocab_size:  # stock sizes the model by the number of tokens
            raise DataError(
                f"{path} has {self.vocab_size} tokens with ids up to {largest}; expected ids below {self.vocab_size}: fill "
                "the holes in the numbering with unused tokens"
            )
        self.eod_id = self._find_eod()

    def _find_eod(self) -> int:
        config = self.folder / "tokenizer_config.json"
        try:
            token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(
                f"{config}: {error}; expected a JSON object with the key eos_token, whose id ends every document"
            ) from error
        name = token.get("content") if isinstance(token, dict) else token
        eod = self.token_id(name) if isinstance(name, str) else None
        if eod is None:
            raise DataError(
                f"{config}: eos_token is {token!r}, which is not a token of tokenizer.json; set eos_token to the token "
                "that is to end every document"
            )
        return eod

    def encode(self, text: bytes) -> NDArray[np.int64]:
        """Return the ids of one document; no specials are added, but a text that spells one becomes it, as in stock's tool."""
        return np.asarray(self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids, dtype=np.int64)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without specials; a piece of a character becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def bytes_of(self, ids: Sequence[int]) -> int:
        """Count the UTF-8 bytes of the text of ``ids``: exact for tokenizers that reproduce a text, as byte-level ones do.

        Ends of documents count 0; other specials are there because the text spells them.
        """
        ids_N = np.asarray(ids, dtype=np.int64)
        documents = np.split(ids_N, np.flatnonzero(ids_N == self.eod_id))
        texts = (self._tokenizer.decode(one[one != self.eod_id].tolist(), skip_special_tokens=False) for one in documents)
        return sum(len(text.encode()) for text in texts)

    def token_id(self, token: str) -> int | None:
        """Return the id of ``token``; None if it is not a token of the vocabulary."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    def added_around_text(self) -> int:
        """Return how many tokens encoding adds to a text, unless told to add none."""
        return int(self._tokenizer.num_special_tokens_to_add(False))

    def checksum(self) -> str:
        """Return :func:`folder_checksum` of the folder."""
        return folder_checksum(self.folder)

    def stock_flags(self) -> list[str]:
        """Return the ``HuggingFaceTokenizer`` flags for this folder; stock needs ``transformers`` for them."""
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(self.folder)]


def folder_checksum(folder: Path) -> str:
    """Return a SHA-256 over the names and contents of a folder's tokenizer files."""
    paths = [path for path in (folder / name for name in _HF_FILES) if path.is_file()]
    lines = [f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def train(
    inputs: Sequence[str | os.PathLike[str]],
    folder: str,
    vocab_size: int,
    *,
    globs: Sequence[str] = (),
    json_key: str = JSON_KEY,
) -> HuggingFaceTokenizer:
    """Train a byte-level BPE on the documents that ``data prepare`` would take, and write it to ``folder``, which must be new.

    Every text can be encoded and decoded without loss. :data:`END` ends documents and has id 0. There are fewer than
    ``vocab_size`` ids where the text has no more pairs; other arguments are as for :func:`megacpp_mcore.data.prepare.prepare`.

    Raises:
        DataError: the inputs or the folder do not allow it, ``vocab_size`` leaves no room for a pair, or ``tokenizers`` is not
            installed.
    """
    if os.path.lexists(folder):
        raise DataError(f"{folder} exists; expected a new folder: choose another --output, or remove it", code="exists")
    if vocab_size <= BYTE_COUNT + 1:
        raise DataError(
            f"the vocabulary size is {vocab_size}; expected more than {BYTE_COUNT + 1}: the bytes and the end of document"
        )
    tokenizers = _tokenizers(f"training {folder}")
    levels = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = levels(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=levels.alphabet(), show_progress=False
    )
    pieces = cut_sources(find_sources(inputs, globs, json_key), 1 << 24)
    texts = (text.decode("utf-8") for piece in pieces for _, text in read_documents(piece, None, json_key))
    made.train_from_iterator(texts, trainer)
    if made.get_vocab_size() == BYTE_COUNT + 1:
        raise DataError(f"the text of {', '.join(map(str, inputs))} has no two characters side by side; expected text")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    try:
        Path(folder).mkdir(parents=True)
        replace(Path(folder, "tokenizer_config.json"), json.dumps(config, indent=1).encode() + b"\n")
        replace(Path(folder, "tokenizer.json"), made.to_str(pretty=True).encode())
    except OSError as error:
        raise DataError(f"{error.filename or folder}: {error.strerror}; expected a folder that can be written") from error
    return HuggingFaceTokenizer(folder)


def _tokenizers(what: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"{what} needs the 'tokenizers' package, which cannot be imported here ({error}); "
            "pip install tokenizers, or use --tokenizer byte"
        ) from error
    return tokenizers


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer ``name``: ``byte``, or the path of a local Hugging Face folder.

    Raises:
        DataError: ``name`` is neither.
    """
    if name == "byte":
        return ByteTokenizer()
    if not os.path.isdir(name):
        raise DataError(
            f"tokenizer {name!r} is neither 'byte' nor an existing folder; expected one of the two "
            "(names on a hub are not looked up: pass the folder that holds tokenizer.json)"
        )
    return HuggingFaceTokenizer(name)


def fitting(folder: str, vocab_size: int | None) -> HuggingFaceTokenizer:
    """Return the tokenizer of a Hugging Face ``folder`` for a model of ``vocab_size`` ids; None: not known.

    Raises:
        DataError: the folder holds no tokenizer, or one with more ids than the model.
    """
    tokenizer = HuggingFaceTokenizer(folder)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer {folder} has {tokenizer.vocab_size} ids, and the model {vocab_size}; set the model's vocab_size to "
            f"{tokenizer.vocab_size}, or name another tokenizer"
        )
    return tokenizer


def tokenizer_words(model: Model, folder: str | None = None, data: str | None = None) -> tuple[str, ...]:
    """Return the stock tokenizer arguments of a run of ``model``: of a Hugging Face ``folder``, or else of bytes or plain ids.

    Without a folder, a model of the bytes' vocabulary has the built-in bytes, and any other unconverted ids, whose
    end-of-document id is that in the manifest of the dataset ``data``.

    Raises:
        DataError: the folder holds no tokenizer, or one with more ids than the model; or as :func:`end_of_document`.
    """
    if folder is not None:
        if importlib.util.find_spec("tokenizers"):  # else the launch compares sizes: a command may be made on another host
            fitting(folder, model.vocab_size)
        return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder)
    if model.vocab_size == BYTE_VOCAB_SIZE:
        return tuple(ByteTokenizer().stock_flags())
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab_size))
    eod = end_of_document([] if data is None else [data])
    return words if eod is None else (*words, "--null-tokenizer-eod-id", str(eod))


def end_of_document(prefixes: Sequence[str]) -> int | None:
    """Return the end-of-document id in the manifest of the first of ``prefixes`` that has one; None where none has.

    Raises:
        DataError: that manifest knows no end-of-document id, or is damaged.
    """
    prefix = next((one for one in prefixes if os.path.exists(manifest_path(one))), None)
    if prefix is None:
        return None
    eod = load_manifest(prefix).tokenizer["eod_id"]
    if eod is None:
        raise DataError(
            f"{prefix} was adopted without an end-of-document id, and Megatron's NullTokenizer needs one; set it with "
            f"`megacpp-mcore data verify --adopt --eod-id ID {prefix}`"
        )
    return int(eod)
