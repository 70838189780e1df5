"""Comparison of a run's processes at the start: arguments, configuration file, code, versions and environment have to be equal.

Each rank parses its own command line and reads its own files, and Megatron trains on whatever it finds there: with another
learning rate on one rank, replicas silently drift apart. The comparison is one collective of digests; only if they differ are
the values exchanged, to name the difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.policy.overlap import CONNECTIONS
from megacpp_mcore.settings import VARIABLE, PluginConfig
from megacpp_mcore.util import console, flags, host
from megacpp_mcore.util.collectives import gathered, rank_and_size
from megacpp_mcore.util.files import sha256_of
from megacpp_mcore.util.stand_in import stand_in

OF_A_RANK = (
    "rank", "local_rank", "node_rank", "data_cache_path", "path_to_cache", "tensorboard_dir", "wandb_save_dir",
    "wandb_exp_name", "non_persistent_local_ckpt_dir", "memory_snapshot_path", "flight_recorder_dump_path",
    "result_rejected_tracker_filename",
)  # fmt: skip
"""Arguments (attributes) that may differ: which rank this is, a name made from the time, and what hosts need not share."""

_OF_A_HOST = frozenset(("path", "cache_root", "given"))
"""Fields of the configuration file's content that are not compared; ``given`` repeats which of the others were set."""

_ENVIRONMENT = re.compile(
    f"{CONNECTIONS}|{'|'.join(host.DISABLING)}|MEGACPP_DISABLE_TE|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    "|NCCL_(ALGO|PROTO)|CUBLAS(?!.*LOG).*|NVTE_(?!DEBUG).*"
)
"""Variables that change what is computed, or in which order."""

_FILES = ("data_args_path", "per_split_data_args_path", "per_dataset_sequences_path", "te_precision_config_file")
"""Arguments (attributes) that name files, compared by content."""

_TIMEOUT = "--distributed-timeout-minutes"
MINUTE = timedelta(minutes=1)
_QUIET = timedelta(seconds=30)
"""How long a rank waits for the others before it says so."""

_REPLY = timedelta(seconds=5)
"""How long the program that listens at rank 0's port may take to answer as a store."""
_ALL = "all"
"""Verdict of a stage that all ranks have reached."""

hosts: list[str] = []
"""The host name of each rank, in rank order, once they have been compared."""


def compared_early(settings: PluginConfig | None) -> contextlib.AbstractContextManager[Any]:
    """Within the context, compare the ranks before Megatron sets up process groups: with other sizes it would hang."""
    from megatron.core import parallel_state

    def run(stock: Any, *args: Any, **kwargs: Any) -> Any:
        compare(settings)
        return stock(*args, **kwargs)

    return stand_in(parallel_state, "initialize_model_parallel", run)


@contextlib.contextmanager
def met(arguments: Sequence[str]) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Wait until all processes of the run have reached one store, as long as Megatron waits; torchrun does so itself.

    Yields a context for checks that may fail on a single host: its end waits for all ranks, and an error in it ends all.
    The store of rank 0 lives as long as ``met``: torch's own is on the same port, and shares its server (``multi_tenant``).

    Raises:
        LaunchError: names the ranks that did not arrive, says that rank 0 did not, or what is wrong on another rank.
    """
    size, given = int(os.environ["WORLD_SIZE"]), flags.read(arguments)
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Of one host, torchrun itself ends the other processes.
    if size == 1 or "--fake-process-group" in given or (by_torchrun and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"):
        yield contextlib.nullcontext
        return
    meeting = _Meeting(size, MINUTE * (flags.whole(given, _TIMEOUT, LaunchError, 1) or 10), by_torchrun)
    if not by_torchrun:
        meeting.begin()
    yield meeting.checks


def _client(store_of: Callable[..., Any], patience: timedelta) -> Any:
    """Return a client of the store; torch 2.11 itself waits forever if another program listens there and never answers."""
    from torch.distributed import DistNetworkError

    client: Future[Any] = Future()

    def run() -> None:
        try:
            client.set_result(store_of(is_master=False, timeout=patience))
        except Exception as error:
            client.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return client.result((patience + _REPLY).total_seconds())
    except TimeoutError:
        raise DistNetworkError("what listens there timed out") from None


class _Meeting:
    """The processes of a run at one store, which runs on rank 0's host and ends with rank 0."""

    def __init__(self, size: int, patience: timedelta, by_torchrun: bool) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank, self.size, self.patience, self.own = int(os.environ["RANK"]), size, patience, socket.gethostname()
        self.this = f"rank {self.rank} of {size} on {self.own}"
        self.where = f"{address}:{port} (MASTER_ADDR, MASTER_PORT)"
        self.advice = (
            f"start a task for each rank, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE={size} on every host, check "
            f"that each reaches {address} (`nc -z {address} {port}`), or give slow ones longer by {_TIMEOUT}"
        )
        self.store = self._connected(address, port, listens=self.rank == 0 and not by_torchrun)

    def _connected(self, address: str, port: int, *, listens: bool) -> Any:
        from torch.distributed import DistError, DistNetworkError, TCPStore

        unknown = f"no address of MASTER_ADDR {address!r}"
        store_of = functools.partial(TCPStore, address, port, self.size, wait_for_workers=False, multi_tenant=True)
        try:
            if not addresses(address):  # its lookups are repeated: a host may be registered late
                console.say(f"megacpp-mcore: {self.this} found {unknown} so far; it retries for {self.patience}")
            return store_of(is_master=True, timeout=self.patience) if listens else _client(store_of, self.patience)
        except DistNetworkError as error:
            if "EADDRINUSE" in str(error):
                try:
                    return _client(store_of, _REPLY)  # of another task with RANK=0
                except DistError:
                    raise error from None
            if self.rank == 0 and "timed out" not in str(error):
                why = f"cannot listen at {self.where}: {error}; choose a free MASTER_PORT above 1023"
            else:
                lacks = f"no rank 0 at {self.where}" if addresses(address) else unknown
                why = f"found {lacks} in {self.patience}; {self.advice}"
            raise LaunchError(f"{self.this} {why}") from error

    def begin(self) -> None:
        """Wait for all ranks; refuse a different WORLD_SIZE, and two processes with the same RANK."""
        process, problem = f"process {os.getpid()} on {self.own}", ""
        with self._reached():
            size = self.store.compare_set("megacpp-mcore/size", "", f"{self.size} on {self.own}").decode()
            first = self.store.compare_set(f"megacpp-mcore/{self.rank}", "", process).decode()
            if size.split()[0] != str(self.size):
                problem = f"differ in WORLD_SIZE: {size}, {self.size} on {self.own}; start all with the same"
            elif self.store.add(f"megacpp-mcore/{self.rank}/processes", 1) > 1:
                problem = (
                    f"have RANK={self.rank} twice, {first} and {process}; set it to the number of each task ($SLURM_PROCID, "
                    "$OMPI_COMM_WORLD_RANK, $PMI_RANK), and give each run a free MASTER_PORT"
                )
            if problem:
                self._end("megacpp-mcore/met", problem := f"the processes that met at {self.where} {problem}")
                raise LaunchError(problem)
        self._join("megacpp-mcore/met")

    @contextlib.contextmanager
    def checks(self) -> Iterator[None]:
        """Wait for all ranks at the end of the context; an error in it ends all."""
        stage = f"megacpp-mcore/checks {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
        try:
            yield
        except Exception as error:
            with contextlib.suppress(LaunchError), self._reached():
                self._end(stage, f"{self.this} ends the run: {error}")
            raise
        self._join(stage)

    def _end(self, stage: str, verdict: str) -> None:
        """Publish a stage's verdict to all ranks that wait for it, unless it has one."""
        self.store.compare_set(f"{stage}/verdict", "", verdict)

    def _join(self, stage: str) -> None:
        """Wait until all ranks have reached ``stage``, or one has reported a problem."""
        from torch.distributed import DistError

        ranks, verdict = {peer: f"{stage}/{peer}" for peer in range(self.size)}, f"{stage}/verdict"
        with self._reached():
            self.store.set(ranks[self.rank], self.own)
            if self.store.add(stage, 1) >= self.size:
                self._end(stage, _ALL)
            with contextlib.suppress(DistError):
                self.store.wait([verdict], min(self.patience, _QUIET))
            if not self.store.check([verdict]):
                console.say(f"megacpp-mcore: {self.this} waits at {self.where} for the others, for {self.patience}")
                with contextlib.suppress(DistError):
                    self.store.wait([verdict], self.patience)
            if self.store.check([verdict]):
                problem = self.store.get(verdict).decode()
            else:
                host_of = {peer: self.store.get(key).decode() for peer, key in ranks.items() if self.store.check([key])}
                here = ", ".join(f"{_named(group)} on {name}" for name, group in _grouped(host_of).items())
                problem = (
                    f"{_named([peer for peer in ranks if peer not in host_of])} of {self.size} did not reach {self.where} in "
                    f"{self.patience}, where {here} wait; {self.advice}"
                )
        if problem != _ALL:
            raise LaunchError(problem)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        from torch.distributed import DistError

        try:
            yield
        except DistError as error:
            raise LaunchError(
                f"rank 0 of {self.size} at {self.where} has ended while others were waited for; its own output says why"
            ) from error


def compare(settings: PluginConfig | None) -> None:
    """Refuse a run whose ranks differ in :func:`collect` of ``settings``, as :func:`compare_facts` does."""
    compare_facts(lambda: collect(settings))


def compare_facts(collected: Callable[[], dict[str, str]]) -> None:
    """Refuse a run whose ranks differ; every rank has to call this, once torch.distributed is initialized.

    Raises:
        LaunchError: on all ranks; names what differs, each value, and its ranks.
    """
    from torch import distributed

    rank, size = rank_and_size()
    if size == 1 or distributed.get_backend() == "fake":
        return
    hosts[:] = gathered(socket.gethostname())
    facts: dict[str, str] = {}
    try:
        facts = collected()
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    except Exception as error:  # the others wait
        digest = f"rank {rank} cannot be compared: {error!r}"
    if len(set(digests := gathered(digest))) > 1:
        failures = [failure for failure in digests if failure.startswith("rank ")]
        raise LaunchError(
            f"the ranks of this run differ; start all of them with the same arguments, {VARIABLE}, code and environment:\n  "
            + "\n  ".join(failures or _differences(gathered(facts)))
        )


def collect(settings: PluginConfig | None) -> dict[str, str]:
    """Collect what has to be equal on all ranks, by name; without a configuration file ``settings`` is None."""
    import megatron.core
    import megatron.training
    from megatron.training import global_vars

    facts = {VARIABLE: "is not used" if settings is None else "is used"}
    own = _digest(Path(megacpp_mcore.__file__).parent)
    facts["the code of megacpp-mcore"] = f"{megacpp_mcore.__version__}, digest {own}"
    # Edits of Megatron that are not committed have no version.
    folders = (Path(package.__path__[0]) for package in (megatron.core, megatron.training))
    facts["the code of Megatron"] = f"digest {' '.join(map(_digest, folders))}"
    facts |= {f"version of {name}": version for name, version in host.versions().items()}
    facts |= {name: value for name, value in os.environ.items() if _ENVIRONMENT.fullmatch(name)}
    arguments = global_vars._GLOBAL_ARGS
    if arguments is None:  # under Megatron-Bridge, whose overrides are words
        own = "|".join(OF_A_RANK).replace("_", "[-_]")
        facts["command line"] = re.sub(rf"\S*\b({own})[= ]\S+", "", " ".join(sys.argv[1:]))
    else:
        values = {name: value for name, value in vars(arguments).items() if name not in OF_A_RANK}
        facts |= {f"--{name.replace('_', '-')}": _text(value) for name, value in values.items()}
        facts |= of_datasets(getattr(arguments, "data_cache_path", None))
        facts |= {
            f"the content of --{name.replace('_', '-')}": sha256_of(Path(path))[:16]
            for name in _FILES
            if isinstance(path := values.get(name), str) and os.path.isfile(path)
        }
    if settings is not None:
        facts |= dict(_flat(VARIABLE, settings))
    return facts


def of_datasets(cache: object) -> dict[str, str]:
    """Return the digest of the datasets' manifests by which ``megacpp_mcore.data.arguments`` named the folder ``cache``."""
    match = re.fullmatch(r".*/([0-9a-f]{16})", str(cache))
    return {"the datasets, by their manifests' digest": match[1]} if match else {}


def peers(address: str | None) -> str:
    """Name the ranks that a lost connection led to: those on the host with ``address``, else those on all other hosts."""
    own, rank = socket.gethostname(), rank_and_size()[0]
    others = _grouped({peer: host for peer, host in enumerate(hosts) if peer != rank})
    remote = [name for name in others if address and address in addresses(name)]
    remote = remote or [name for name in others if name != own] or [own]
    return ", ".join(f"{_named(others[name])} on {name}" for name in remote)


def addresses(name: str) -> set[str]:
    """Return the addresses that the host ``name`` has, as seen from this one; none if it is unknown."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # a part of the name is too long
        return set()


def _differences(of_ranks: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield one line per name whose value is not the same on all ranks: the values, the rarest first, with their ranks."""
    for name in dict.fromkeys(name for facts in of_ranks for name in facts):
        holders = _grouped({rank: facts.get(name, "not set") for rank, facts in enumerate(of_ranks)})
        if len(holders) > 1:
            rarest = sorted(holders.items(), key=lambda item: len(item[1]))
            yield f"{name}: " + "; ".join(f"{value} on {_named(ranks)}" for value, ranks in rarest)


def _grouped(value_of: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that have each value."""
    ranks: dict[str, list[int]] = {}
    for rank, value in value_of.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _named(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 2`` or ``12 ranks from 4 to 19``."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Flatten the values in nested dataclasses and mappings, by dotted name."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OF_A_HOST:
                yield from _flat(f"{name} {key}" if name == VARIABLE else f"{name}.{key}", inner)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    """Write a value without what differs between equal ones of two processes: the order of a set, and addresses."""
    ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(ordered))


@functools.cache
def _digest(root: Path) -> str:
    """Return a digest of a package's Python files."""
    files = sorted(Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    lines = [f"{file.relative_to(root)} {sha256_of(file)}" for file in files if file.suffix == ".py" and file.is_file()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
