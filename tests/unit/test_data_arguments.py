"""Datasets named on a stock command line are found, and checked before training."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from megacpp_mcore import launcher
from megacpp_mcore.data.arguments import dataset_prefixes, verify_arguments
from megacpp_mcore.data.manifest import adopt
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.tokenizer import ByteTokenizer
from megacpp_mcore.errors import DataError
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.recipe_command import tokenizer_words


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    source = tmp_path / "text.txt"
    source.write_text("a short document\n" * 200)
    prepare([str(source)], str(tmp_path / "set"))
    return str(tmp_path / "set")


def test_prefixes_of_blends_and_splits() -> None:
    words = [
        "--data-path",
        "0.3",
        "one",
        "0.7",
        "two",
        "--seed",
        "1",
        "--valid-data-path=three",
        "--test-data-path",
        "one",
    ]
    assert dataset_prefixes(words) == ["one", "two", "three"]


def test_the_last_flag_counts() -> None:
    assert dataset_prefixes(["--data-path", "old", "--data-path", "new"]) == ["new"]


def test_a_whole_dataset_is_verified(prefix: str) -> None:
    words = ["--data-path", prefix, *tokenizer_words(preset("nam56r_tiny"))]
    assert verify_arguments(words) == f"data: {prefix} verified against its manifest"


BLENDS = [
    ["2024"],
    ["0.3", "one", "0.7", "two"],
    ["2024", "one"],
    ["one", "2024", "two", "2025"],
    ["2024", "2025", "2026"],
    ["1e3", "2024", "nan", "7"],
    ["one", "two"],
    [" one ", "two", "three"],
]


@pytest.mark.parametrize("blend", BLENDS)
def test_prefixes_are_told_from_weights_as_stock_does(blend: list[str], tmp_path: Path) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    stock, _ = get_blend_from_list(blend)
    assert dataset_prefixes(["--data-path", *blend, "--seed", "1"]) == stock
    (tmp_path / "list").write_text("\n".join(blend))
    assert dataset_prefixes(["--data-args-path", str(tmp_path / "list")]) == [prefix.strip() for prefix in stock]
    (tmp_path / "splits").write_text(json.dumps({"train": blend, "valid": None, "test": "5 last"}))
    assert dataset_prefixes([f"--per-split-data-args-path={tmp_path / 'splits'}"]) == [*stock, "last"]


def test_a_dataset_whose_name_is_a_number_is_verified(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix in (".bin", ".idx", ".manifest.json"):
        os.rename(prefix + suffix, Path(prefix).parent / f"2024{suffix}")
    monkeypatch.chdir(Path(prefix).parent)
    words = ["--data-path", "2024", *ByteTokenizer().stock_flags()]
    assert verify_arguments(words) == "data: 2024 verified against its manifest"
    Path("2024.bin").write_bytes(Path("2024.bin").read_bytes()[:-1] + b"\7")
    with pytest.raises(DataError, match=r"2024\.bin"):
        verify_arguments(words)


def test_a_blend_that_stock_cannot_take_is_refused() -> None:
    with pytest.raises(DataError, match="'two' stands where other datasets have their weight"):
        dataset_prefixes(["--data-path", "0.3", "one", "two", "three"])


@pytest.mark.parametrize("content", [None, b"[", b"[1]", b'{"train": "a", "valid": "b"}', b'{"train": 3}', b"\xff"])
def test_a_file_of_datasets_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "splits").write_bytes(content)
    with pytest.raises(DataError, match=r"splits: .*expected"):
        verify_arguments(["--per-split-data-args-path", str(tmp_path / "splits")])
    if content in (None, b"\xff"):
        with pytest.raises(DataError, match=r"splits: .*expected"):
            verify_arguments(["--data-args-path", str(tmp_path / "splits")])


def test_a_command_line_without_datasets_says_so() -> None:
    assert verify_arguments(["--mock-data"]) == "data: none named"


def test_another_vocabulary_or_end_of_document_is_refused(prefix: str) -> None:
    words = ["--data-path", prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size"]
    for other in (["260", "--null-tokenizer-eod-id", "0"], ["260"]):  # the second means 259, Megatron's default
        with pytest.raises(DataError, match="256"):
            verify_arguments([*words, *other])
    with pytest.raises(DataError, match="100"):
        verify_arguments([*words, "100", "--null-tokenizer-eod-id", "256"])
    with pytest.raises(DataError, match="--vocab-size is 'abc'; expected an integer"):
        verify_arguments([*words, "abc"])


def test_padding_does_not_move_the_default_end_of_document(prefix: str) -> None:
    words = ["--data-path", prefix, "--tokenizer-type", "NullTokenizer", "--padded-vocab-size", "384"]
    verify_arguments([*words, "--vocab-size", "257"])  # its end of document is 256, the dataset's
    with pytest.raises(DataError, match="training uses 383"):
        verify_arguments([*words, "--vocab-size", "384"])
    with pytest.raises(DataError, match="260 token ids, and the model embeds 258"):
        verify_arguments([*words[:-1], "258", "--vocab-size", "257"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face tokenizer of 300 words, whose last is the end of document."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    words = {"document": 0, "short": 1, "a": 2} | {f"w{n}": n for n in range(3, 300)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "hf").mkdir()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": "w299"}')
    return tmp_path / "hf"


def test_a_tokenizer_that_changed_is_noticed(prefix: str, folder: Path, tmp_path: Path) -> None:
    prepare([str(tmp_path / "text.txt")], str(tmp_path / "words"), tokenizer=str(folder))
    words = ["--data-path", str(tmp_path / "words"), "--tokenizer-type", "HuggingFaceTokenizer"]
    words += ["--tokenizer-model", str(folder)]
    verify_arguments(words)
    content = (folder / "tokenizer.json").read_text()
    swapped = content.replace('"document": 0', '"document": 1').replace('"short": 1', '"short": 0')
    swapped = swapped.replace('"document":0', '"document":1').replace('"short":1', '"short":0')
    assert swapped != content
    (folder / "tokenizer.json").write_text(swapped)
    with pytest.raises(DataError, match=r"words\.bin was made with the huggingface tokenizer of checksum"):
        verify_arguments(words)
    (tmp_path / "words.manifest.json").unlink()
    adopt(str(tmp_path / "words"), vocab_size=300, eod_id=299)  # it does not say which tokenizer made it
    verify_arguments(words)


def test_bytes_and_words_are_not_taken_for_each_other(prefix: str, folder: Path, tmp_path: Path) -> None:
    words = ["--data-path", prefix, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    with pytest.raises(DataError, match="made with the byte tokenizer"):
        verify_arguments(words)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w256"}')
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = {word: n for word, n in content["model"]["vocab"].items() if n < 260}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    prepare([str(tmp_path / "text.txt")], str(tmp_path / "words"), tokenizer=str(folder))
    words = ["--data-path", str(tmp_path / "words"), *ByteTokenizer().stock_flags()]
    with pytest.raises(DataError, match="made with the huggingface tokenizer"):
        verify_arguments(words)
    verify_arguments([*words[:-1], "259"])  # ids as they are, whatever made them


def build_stock_samples(prefixes: list[str], cache: str | None = None) -> tuple[int, int]:
    """Have stock build, or find in its cache, the indices of a blend; return largest document, samples of the first."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=260, eod_id=256, pad_id=258
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=(prefixes, [1.0] * len(prefixes) if len(prefixes) > 1 else None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=cache,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config).build()[0]
    first = built.datasets[0] if len(prefixes) > 1 else built
    return int(np.max(first.document_index)), len(first.document_index)


def replace_dataset(prefix: str, documents: int) -> None:
    folder = Path(prefix).parent / "texts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number in range(documents):
        (folder / f"{number:03d}.txt").write_text(f"document {number:03d}")
    prepare([str(folder)], prefix, overwrite=True)


def age(folder: Path) -> None:
    """Make what was cached older than what comes now, even where the clock of the file system is coarse."""
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - 60, time.time() - 60))


def test_preparing_again_removes_what_stock_has_cached_of_the_old_dataset(prefix: str) -> None:
    replace_dataset(prefix, 4)
    assert build_stock_samples([prefix]) == (3, 4)
    (Path(prefix) / "cache" / "GPTDataset_indices" / "mine.npy").write_text("no file of stock's")
    replace_dataset(prefix, 40)
    assert [path.name for path in Path(prefix).rglob("*") if path.is_file()] == ["mine.npy"]
    assert build_stock_samples([prefix])[1] == 40


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_indices_cached_of_an_older_dataset_are_removed(
    prefix: str, tmp_path: Path, blended: bool, given: bool
) -> None:
    other, cache = str(tmp_path / "other"), str(tmp_path / "cache") if given else None
    replace_dataset(other, 6)
    replace_dataset(prefix, 4)
    prefixes = [prefix, other] if blended else [prefix]
    words = ["--data-path", *(word for name in prefixes for word in ("1", name)), *ByteTokenizer().stock_flags()]
    words += ["--data-cache-path", cache] if cache else []
    assert build_stock_samples(prefixes, cache)[1] == 4
    assert "removed" not in verify_arguments(words)

    age(Path(cache or prefix))
    assert build_stock_samples([other], cache)[1] == 6
    fresh = [path for path in tmp_path.rglob("*_index.npy") if path.stat().st_mtime > time.time() - 30]
    # Something else than prepare brings the new dataset, with times older than the cache's.
    (tmp_path / "elsewhere").mkdir()
    replace_dataset(str(tmp_path / "elsewhere" / "new"), 40)
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(f"{tmp_path / 'elsewhere' / 'new'}{suffix}", prefix + suffix)
        os.utime(prefix + suffix, (time.time() - 3600, time.time() - 3600))

    said = verify_arguments(words)
    assert "; removed cached indices older than the data: " in said
    assert "-GPTDataset-train" in said
    assert ("-BlendedDataset-train" in said) == (blended and given)  # stock keeps no blend beside a dataset
    assert len(fresh) >= 3
    assert all(path.exists() for path in fresh)
    assert "removed" not in verify_arguments(words)
    assert build_stock_samples(prefixes, cache)[1] == 40


def test_a_link_that_leads_elsewhere_makes_a_cache_old(prefix: str, tmp_path: Path) -> None:
    link, cache = tmp_path / "current", tmp_path / "cache"
    for name, documents in (("v1", 4), ("v2", 40)):
        (tmp_path / name).mkdir()
        replace_dataset(str(tmp_path / name / "set"), documents)
    link.symlink_to("v1")
    assert build_stock_samples([str(link / "set")], str(cache))[1] == 4
    time.sleep(0.02)  # the cache is newer than both datasets, and older than the link that comes now
    link.unlink()
    link.symlink_to("v2")
    words = ["--data-path", str(link / "set"), *ByteTokenizer().stock_flags(), f"--data-cache-path={cache}"]
    assert "removed" in verify_arguments(words)
    assert build_stock_samples([str(link / "set")], str(cache))[1] == 40


def test_a_stale_cache_that_cannot_be_removed_stops_the_launch(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build_stock_samples([prefix])
    age(Path(prefix))

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(DataError, match=r"older than the dataset.*cannot be removed \(Permission denied\)"):
        verify_arguments(["--data-path", prefix, *ByteTokenizer().stock_flags()])


def test_ids_of_a_wider_model_take_the_end_of_document_from_the_manifest(prefix: str) -> None:
    words = tokenizer_words(preset("nam56r_quarter"), data=prefix)
    assert words[-2:] == ("--null-tokenizer-eod-id", "256")
    verify_arguments(["--data-path", prefix, *words])


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_launch_on_a_damaged_dataset_stops_before_megatron(prefix: str, suffix: str) -> None:
    path = Path(prefix + suffix)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        data=("--data-path", prefix),
        tokenizer=tokenizer_words(preset("nam56r_tiny")),
    )
    words = lower(preset("nam56r_tiny"), Layout(), training)
    with pytest.raises(DataError, match=str(path)):
        launcher.launch(words, device="cpu")
