"""Wrong inputs of newcomers: each is one line that says what to do, before Megatron's list of arguments, and status 2."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from megacpp_mcore.commands import cli
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import LaunchError, MegacppError
from megacpp_mcore.launch import refusals
from megacpp_mcore.policy import ranks
from tests import stock, tiny_run
from tests.errors import raises

EMIT = "recipe emit nam56r_tiny"
WHOLE = "recipe emit nam56r"
LAUNCH = "launch --device cpu -- {words}"

AT_THE_COMMAND_LINE = [
    ("", " --help"),
    ("patch", " --help"),
    ("launch --device tpu", " --help"),
    ("doctor -- x", " --help"),
    ("recpie list", "did you mean 'recipe'?"),
    ("recipe list --lr", "unrecognized arguments: --lr"),
    ("recipe show launch -- nam56r", "unrecognized arguments"),
    ("recipe show nam56", "there is no model or recipe 'nam56'; did you mean 'nam56r'"),
    ("recipe emit nam56r_tyni", "there is no model or recipe 'nam56r_tyni'; did you mean 'nam56r_tiny'"),
    (f"{EMIT} --tokenizer nope", "tokenizer folder nope has no tokenizer.json"),
    (f"{EMIT} --global-batchsize 4", "did you mean '--global-batch-size'"),
    (f"{EMIT} --lr abc", "invalid float value: 'abc'"),
    (f"{EMIT} --set hidden_size", "KEY=VALUE"),
    (f"{EMIT} --set hidden_size=64", "add --settings FILE"),
    (f"{EMIT} --set hidden_size=64 --settings afile", "choose another file, or add --overwrite"),
    (f"{EMIT} --global-batch-size 3 --micro-batch-size 2", "change --global-batch-size or --micro-batch-size"),
    (f"{EMIT} --nodes 0", "--nodes: found '0', expected a whole number, 1 or more"),
    (f"{EMIT} --lr nan", "error: --lr is nan"),
    (f"{EMIT} --train-iters -5", "--train-iters is -5"),
    (f"{EMIT} --set clip_grad=-1", "error: clip_grad is -1.0"),
    (f"{EMIT} --as slurm", "add --device cuda"),
    (f"{EMIT} --as args", "add --data PREFIX"),
    (f"{EMIT} --via bare", "needs the CPU lane"),
    (f"{EMIT} --settings x.yaml", "nothing is changed"),
    (f"{EMIT} --set dsa.topk=64 --settings 'no folder/x.yaml'", "cannot be written"),
    (f"{EMIT} --set dsa.topk=64 --settings /dev/full", "/dev/full is not a regular file"),
    (f"{EMIT} --set dsa.topk=64 --settings binary", "choose another file, or add --overwrite"),
    (f"{WHOLE} --partition x", "--partition is an option of a batch job"),
    (f"{WHOLE} --pipeline 2", "layer 29"),
    (f"{WHOLE} --expert 7 --set dsa.topk=8 --settings new.yaml", "expert parallelism (7)"),  # not the batch
    (f"{WHOLE} --expert 16", "global batch of 8 is not a multiple of the micro-batch (1) × 16"),
    (f"{WHOLE} --expert 8 --nodes 3", "8 processes do not spread evenly over 3 nodes"),
    (f"{WHOLE} --expert 8 --gpus-per-node 3", "a multiple of 8 processes, and 1 nodes × 3 are 3"),
    (f"{WHOLE} --device cpu --impl transformer_engine", "CPU lane has no Transformer Engine"),
    (f"{WHOLE} --set topk=3", "did you mean 'dsa.topk' or 'moe.topk'?"),
    (f"{WHOLE} --set depth=3 depth=4", "depth is given twice"),
    (f"{WHOLE} --set depth=many", "'depth=many': 'many' is not a whole number"),
    (f"{WHOLE} --set m2rnn.heads=x", "'x' is not a whole number or none"),
    (f"{WHOLE} --set moe.topk=99", "nam56r with moe.topk=99 cannot be built"),
    (f"{WHOLE} --set heads=3", "hidden_size (3584) is not a multiple of heads (3)"),
    (f"{WHOLE} --set train_iters=0", "train_iters is 0; expected 1 or more"),
    (f"{WHOLE} --set adam_beta2=1.5", "adam_beta2 is 1.5; expected less than 1"),
    (f"{WHOLE} --set seed={2**32}", "seed is 4294967296; expected less than 2**32"),
    (f"{WHOLE} --set seed=0", "seed is 0; expected 1 or more"),
    (f"{WHOLE} --set train_iters=3 --train-iters 3", "--train-iters"),
    (f"{EMIT} -- --lr 1", "--set learning_rate="),
    (f"{EMIT} -- --tensor-model-parallel-size 2", "--set tensor="),
    (f"{EMIT} -- --spec local", "--spec"),
    (f"{EMIT} -- --use-checkpoint-args", "--use-checkpoint-args"),
    (f"{EMIT} -- --save x", "--save-interval"),
    (f"{EMIT} -- --openai-gelu", "--openai-gelu"),
    ("recipe list -- --lr", "-- --lr"),
    (f"MEGACPP_CONFIG=nope.yaml {EMIT}", "has to name a YAML file"),
    (f"MEGACPP_CONFIG=key.yaml {EMIT}", "did you mean 'model'"),
    ("data prepare nope.txt --output x/y", "No such file or directory"),
    ("data prepare afile --output y --tokenizer nope", "pass the folder that holds tokenizer.json"),
    ("report compare nope nope2", "expected the folder of a run that was observed, or a receipt"),
    ("score --heldout x --output /dev/full -- {words}", "--output: /dev/full is not a regular file"),
    ("score --heldout x --output afile -- {words}", "--output: afile exists; expected a new file"),
    ("report html . --output afile", "--output: afile exists; expected a new file"),
    ("score --heldout x --output= -- {words}", "is not a regular file; expected one, or a name that is free"),
    ("score --heldout x --output 'no folder/x.json' -- {words}", "no folder, or name another file"),
    ("sample --prompt '' -- {words}", "--prompt: found ''"),
    ("sample --prompt 'a\udcff' -- {words}", r"--prompt: found 'a\udcff', expected UTF-8"),
    ("launch --lr 1", "--lr 1"),
    ("launch --device cpu pretrain_gpt.py --lr 1", "launch [OPTIONS] -- pretrain_gpt.py …"),
    ("launch --device cpu {words}", "before --: "),
    ("launch --device cpu --patch nope -- {words}", "there is no patch 'nope'"),
    ("launch --device cpu --profile 5- -- {words}", "expected the first and the last, such as 10-14"),
    (f"{LAUNCH} --verbose", "put it before the `--`"),
    (f"{LAUNCH} --load latest", "--load latest does not exist; expected the folder that --save named"),
    (f"{LAUNCH} --load .", "--load . holds no checkpoint"),
    (f"{LAUNCH} --load . --save saved --save-interval 1 --ckpt-step 3", "--load . holds no checkpoint"),
    (f"{LAUNCH} --load afile", "--load afile is a file"),
    (f"{LAUNCH} --load saved/iter_0000003", "--load saved --ckpt-step 3"),
    (f"{LAUNCH} --save saved", "add --save-interval N"),
    (f"{LAUNCH} --dataloader-type external", "expected single or cyclic"),
    (f"{LAUNCH} --train-iters 30 --lr-warmup-iters 30", "add --lr-warmup-iters 3"),
    (f"{LAUNCH} --train-iters 0", "expected a whole number, 1 or more"),
    (f"{LAUNCH} --eval-interval 0 --eval-iters 1", "--eval-interval is '0'"),
    (f"{LAUNCH} --spec nam56r", "--spec megacpp_mcore.PRESET"),
    (f"{LAUNCH} --phase-transition-iterations 3", "--phase-transition-iterations is for runs with --train-samples"),
    (f"{LAUNCH} --loss-scale 128", "--loss-scale is for runs with --fp16 or --bf16 or --use-distributed-optimizer"),
    (f"{LAUNCH} --reset-position-ids", "--reset-position-ids resets positions that only learned embeddings read"),
]
BY_MEGATRON = [
    ("--global-batchsize 3", "did you mean '--global-batch-size'"),
    ("--lr abc", "argument --lr: invalid float value: 'abc'; megatron/training/arguments.py has"),
    ("--global-batch-size 3 --micro-batch-size 2", "(3) must be divisible by eval_micro_batch_size (2)"),
    ("--seq-length 512", "max_position_embeddings (256) must be greater than or equal to seq_length (512)"),
    ("--num-attention-heads 3", "assert args.hidden_size % args.num_attention_heads == 0"),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("A text.\n" * 200)
    prepare([str(folder / "a.txt")], str(folder / "text"))
    return stock.words(tiny_run.preset("nam56r_tiny"), data=("--data-path", str(folder / "text"), "--split", "100,0,0"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "afile").write_text("a: 1\n")
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "key.yaml").write_text("modle: nam56r_tiny\n")
    monkeypatch.chdir(tmp_path)
    for variable in ("MEGATRON_LM", "MEGACPP_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.mark.parametrize(("command", "says"), AT_THE_COMMAND_LINE)
def test_a_wrong_command_is_one_line_before_anything_starts(
    command: str,
    says: str,
    words: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = shlex.split(command.format(words=shlex.join(words)))
    if command and given[0].startswith("MEGACPP_CONFIG="):
        monkeypatch.setenv(*given.pop(0).split("="))
    left = sorted(os.listdir(here))
    try:
        status: Any = cli.main(given)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status == 2
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert says in printed.err
    assert sorted(os.listdir(here)) == left


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("--load .", "latest_checkpointed_iteration.txt"),
        ("--load .", "iter_0000003"),  # with --ckpt-step, or of a first save that was killed
        ("--load .", "release"),
        ("--load ./saved/ --save saved --save-interval 1", "saved"),
        ("--save saved --persistent-save-interval 2", "saved"),
        ("--train-iters 2 --lr-warmup-iters 2 --lr-decay-iters 3", "saved"),
        ("--fp16 --loss-scale 128 --phase-transition-iterations 2 --train-samples 4", "saved"),
        ("--bf16 --initial-loss-scale 65536 --hysteresis 2", "saved"),  # as scripts for both precisions have it
        ("--load . --pretrained-checkpoint other", "folder"),
        ("--load . --non-persistent-ckpt-type local", "folder"),
        ("--load msc://bucket/saved", "folder"),
    ],
)
def test_what_can_be_loaded_or_started_anew_is_not_refused(words: str, made: str, here: Path) -> None:
    (here / made).mkdir()
    refusals.check_words(words.split(), here=True)


@pytest.mark.parametrize(("more", "says"), BY_MEGATRON)
def test_what_megatron_says_of_arguments_is_one_line(
    more: str, says: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as raised, refusals.in_one_line(None):
        stock.parse([*words, *more.split()])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr().err == ""


def test_the_parser_reports_errors_itself_afterwards() -> None:
    before = argparse.ArgumentParser.error
    with refusals.in_one_line(None):
        assert argparse.ArgumentParser.error is not before
    assert argparse.ArgumentParser.error is before


def test_a_full_disk_is_named() -> None:
    """A cache's, say."""
    with raises(LaunchError, "No space left", "--observe"), refusals.in_one_line(None):
        raise OSError(28, os.strerror(28))


def test_a_path_that_does_not_exist_is_named_with_its_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--lr", "1", "--per-dataset-sequences-path", str(tmp_path / "counts")])
    with raises(LaunchError, f"--per-dataset-sequences-path {tmp_path}/counts"), refusals.in_one_line(None):
        (tmp_path / "counts").read_text()
    with pytest.raises(FileNotFoundError), refusals.in_one_line(None):
        (tmp_path / "other").read_text()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with raises(LaunchError, f"localhost:{port}"), refusals.in_one_line(None):
            TCPStore("localhost", port, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize(
    ("said", "peers"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9372"),
            "rank 3 on localhost",
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:538] Read error [203.0.113.7]:22745: Connection reset by peer"),
            "ranks 1, 2 on second, rank 3 on localhost",
        ),
        (
            DistBackendError("NCCL error in: NCCLUtils.hpp:1, remote process exited, ncclRemoteError: A call failed"),
            "ranks 1, 2 on second",
        ),
        (DistNetworkError("Broken pipe"), "ranks 1, 2 on second"),
    ],
)
def test_a_lost_connection_names_rank_and_host(said: Exception, peers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = socket.gethostname()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(ranks, "hosts", [own, "second", "second", "localhost"])
    with raises(LaunchError, f"rank 0 of 4 on {own}", peers, "--load") as raised, refusals.in_one_line(None):
        raise said
    assert raised.value.__cause__ is said
    monkeypatch.setattr(ranks, "hosts", [own, own])
    with raises(LaunchError, f"rank 0 of 2 on {own}", f"rank 1 on {own}"), refusals.in_one_line(None):
        raise said
    monkeypatch.setattr(ranks, "hosts", [own])
    with pytest.raises(type(said)) as kept, refusals.in_one_line(None):
        raise said
    assert kept.value is said


def test_a_slow_rank_is_not_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo says the same of one that has gone without a word."""
    said = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 90000ms for recv operation to complete")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ranks, "hosts", ["first", "second"])
    with (
        raises(LaunchError, "rank 1 of 2", "90 s", "--distributed-timeout-minutes") as raised,
        refusals.in_one_line(None),
    ):
        raise said
    assert raised.value.__cause__ is said
    assert "lost" not in str(raised.value)


@pytest.mark.parametrize("said", ["Connection reset by peer", "s3://bucket/part: Broken pipe"])
def test_a_lost_connection_to_something_else_blames_no_rank(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "hosts", ["first", "second"])
    with pytest.raises(RuntimeError, match=said) as raised, refusals.in_one_line(None):
        raise RuntimeError(said)
    assert not isinstance(raised.value, LaunchError)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), "unexpected pos 704 vs 598"),
        (RuntimeError("Worker failure: An error is caught while starting worker 0, error: <class 'RuntimeError'>"), "Worker"),
        (RuntimeError("Worker failure: unexpected pos 7 vs 5\nOSError: File too large"), "(File too large)"),
        (OSError(28, os.strerror(28)), "(No space left on device)"),
    ],
)
def test_a_disk_that_is_full_at_a_save_is_named(said: Exception, named: str, tmp_path: Path) -> None:
    saving = tmp_path / "checkpointing.py"
    saving.write_text("raise said\n")
    with mock.patch.object(sys, "argv", ["x.py", "--save", str(tmp_path)]):
        for others in ("no checkpoint there is complete yet", "the checkpoints before it are whole"):
            with raises(LaunchError, f"--save {tmp_path}", "GB", named, others), refusals.in_one_line(None):
                runpy.run_path(str(saving), init_globals={"said": said})
            (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
        if not isinstance(said, OSError):
            with pytest.raises(type(said)) as raised, refusals.in_one_line(None):  # of another place
                raise said.with_traceback(None)
            assert raised.value is said


def test_another_length_of_training_names_the_way_on() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    scheduler = mock.Mock(override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False)
    with raises(LaunchError, "iterations 12", 16, "--override-opt_param-scheduler"), refusals.in_one_line(None):
        OptimizerParamScheduler._check_and_set(scheduler, 16, 12, "total number of iterations")


def test_any_other_failure_keeps_its_traceback_and_shows_the_end_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    for failure, is_shown in (
        (RuntimeError("boom"), True),
        (SystemExit(3), True),
        (SystemExit(0), False),
        (MegacppError("known"), False),
    ):
        with pytest.raises(type(failure)), refusals.in_one_line(log):
            raise failure
        printed = capsys.readouterr().out
        assert ("line 99" in printed, "line 9\n" in printed) == (is_shown, False)
        assert (str(log) in printed) == is_shown
