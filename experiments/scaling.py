"""An analytical model of replicas of ``nam56r`` on up to 512 H200s; :mod:`experiments.figures` writes its table.

A step of n replicas with the distributed optimizer is that of one with Adam's time divided by n, plus: gradients are divided
by n, a part of the collectives is exposed, all wait for the slowest card, and kernels start later. Collectives are rings, a
bucket at a time, overlapping the last micro-batch's backward pass (reduction) and the first one's forward pass (gathering),
except for the last bucket, which has the embedding. Times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from megacpp_mcore.model import parameters, preset
from megacpp_mcore.model.run import BUCKET_ELEMENTS

MEGATRONS_BUCKET = 40_000_000
"""Megatron's default ``--ddp-bucket-size`` for up to 40 replicas: in rows before b8e159e."""
PARTS = {name: part.tensor + part.expert + part.whole for name, part in parameters.by_part(preset("nam56r")).items()}
ELEMENTS = sum(PARTS.values())

# Measured on 1, 2 and 4 H200s of one host: profiles of cbb992c (profile_nam56r_h200.txt), and rows of `micro-batch 2`.
ADAM, DIVISION = 59.4, 8.7
"""The optimizer of one replica; the pass that divides the gradients."""
REDUCES, GATHERS = 290e6, 215e6
"""Bytes per millisecond of a ring of four, on the rank that waits least."""
HIDES_REDUCTION, HIDES_GATHERING = 275.0, 138.0
"""Backward and forward of a micro-batch of two sequences."""
LATER = 18.0
"""Kernels that start later, fitted to the rows with buckets of 120 million. Idle time is 55 on one GPU, 68 to 86 on four."""
APART = 0.012
"""Standard deviation of a card's speed, as of machines: one run on each of five differed by 2.8 % (five on one: 0.4 %)."""

# Assumed: nothing has been run between hosts.
A_HOST, NETWORK = 8, 45e6
"""GPUs of a host; bytes a millisecond of a GPU's own adapter of 400 Gb/s. A ring uses the adapters of all its GPUs at once."""
NVLINK_HOP, NETWORK_HOP = 0.003, 0.012
"""Latency of one step of a ring."""


def hosts_of(gpus: int) -> int:
    """Return the number of hosts that ``gpus`` neighbours fill."""
    return -(-gpus // A_HOST)


@dataclass(frozen=True)
class Replicas:
    """A run of ``gpus`` replicas, with ``sequences`` on each per step in micro-batches of two.

    Attributes:
        instances: ``--num-distributed-optimizer-instances``: the number of groups that shard, with shards summed across them.
        bucket: ``--ddp-bucket-size``; None: the recipes' below 120 replicas, then Megatron's, 1,000,000 per replica.
    """

    gpus: int
    sequences: int = 8
    instances: int = 1
    bucket: int | None = None

    @property
    def buckets(self) -> float:
        """Number of buckets of a step's gradients."""
        return ELEMENTS / (self.bucket or max(BUCKET_ELEMENTS, 1_000_000 * self.gpus))

    @property
    def ranks(self) -> int:
        """Number of GPUs of an instance, which are neighbours."""
        return self.gpus // self.instances

    def ring(self, gradient_bytes: float, rate: float, ranks: int, hosts: int) -> float:
        """Return the time to reduce-scatter, or gather, ``gradient_bytes`` over ``ranks`` GPUs, evenly on ``hosts``."""
        if hosts > 1:
            rate = min(rate, ranks / hosts * NETWORK)
        latency = (ranks - hosts) * NVLINK_HOP + (hosts - 1) * NETWORK_HOP
        return gradient_bytes * (ranks - 1) / ranks / rate + self.buckets * latency

    @property
    def reduction(self) -> float:
        """Time for all gradients in fp32: scattered in each instance, and shards summed (scattered, gathered) across them."""
        across = self.ring(4 * ELEMENTS / self.ranks, REDUCES, self.instances, min(self.instances, hosts_of(self.gpus)))
        return self.ring(4 * ELEMENTS, REDUCES, self.ranks, hosts_of(self.ranks)) + 2 * across

    @property
    def gathering(self) -> float:
        """Time for all weights in bf16."""
        return self.ring(2 * ELEMENTS, GATHERS, self.ranks, hosts_of(self.ranks))

    @property
    def exposed(self) -> float:
        """Communication time that no computation hides."""
        tail = (PARTS["embedding"] / ELEMENTS + 1 / self.buckets) * (self.reduction + self.gathering)
        return tail + max(0.0, self.reduction - HIDES_REDUCTION) + max(0.0, self.gathering - HIDES_GATHERING)

    @property
    def waiting(self) -> float:
        """Share of a step: the expected slowest of n normal draws (Blom's approximation)."""
        return APART * NormalDist().inv_cdf((self.gpus - 0.375) / (self.gpus + 0.25))

    def step(self, one: float) -> float:
        """Return the time of a step if one GPU with eight sequences takes ``one``."""
        share = self.sequences / 8
        computing = (one - ADAM) * share
        return computing * (1 + self.waiting) + ADAM / self.ranks + DIVISION + self.exposed + LATER * share


TABLE = (
    Replicas(2),
    Replicas(2, bucket=MEGATRONS_BUCKET),
    Replicas(4),
    Replicas(4, bucket=MEGATRONS_BUCKET),
    Replicas(8),
    Replicas(64),
    Replicas(512),
    Replicas(512, bucket=BUCKET_ELEMENTS),
    Replicas(512, instances=4),
    Replicas(512, instances=64),
    Replicas(512, sequences=2),
)
