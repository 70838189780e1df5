"""A model on paper of replicas of ``nam56r`` on up to 512 H200s; :mod:`experiments.figures` writes its table.

A step of n replicas with the distributed optimizer is that of one with Adam's time divided, and besides: gradients are divided
by n, a part of the collectives is not hidden, the slowest card is waited for, and kernels start later. Collectives are rings, a
bucket at a time, behind the last micro-batch's backward pass (reduction) and the first one's forward pass (gathering), but for
the last bucket, which has the embedding. Times are milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from megacpp_mcore.model import parameters, preset
from megacpp_mcore.model.run import BUCKET_ELEMENTS

MEGATRONS_BUCKET = 40_000_000
"""``--ddp-bucket-size`` of up to 40 replicas, where nothing else is given: of rows before b8e159e."""
PARTS = {name: part.tensor + part.expert + part.whole for name, part in parameters.by_part(preset("nam56r")).items()}
ELEMENTS = sum(PARTS.values())

# Measured on 1, 2 and 4 H200s of one host: profiles of cbb992c (profile_nam56r_h200.txt), and rows of `micro-batch 2`.
ADAM, DIVISION = 59.4, 8.7
"""The optimizer of one replica; the pass that divides the gradients."""
REDUCES, GATHERS = 290e6, 215e6
"""Bytes a millisecond of a ring of four, of the rank that waits least."""
HIDES_REDUCTION, HIDES_GATHERING = 275.0, 138.0
"""Of a micro-batch of two sequences, backward and forward."""
LATER = 18.0
"""Kernels that start later, fitted to the rows with buckets of 120 million. Idle time is 55 of one, and 68 to 86 of four."""
APART = 0.012
"""Standard deviation of a card's speed, as of machines: one run on each of five differed by 2.8 % (five of one: 0.4 %)."""

# Assumed: nothing has been run between hosts.
A_HOST, NETWORK = 8, 45e6
"""GPUs of a host; bytes a millisecond of a GPU's own adapter of 400 Gb/s. A ring uses the adapters of all its GPUs at once."""
NVLINK_HOP, NETWORK_HOP = 0.003, 0.012
"""Latency of one step of a ring."""


def hosts_of(gpus: int) -> int:
    """The hosts that ``gpus`` neighbours fill."""
    return -(-gpus // A_HOST)


@dataclass(frozen=True)
class Replicas:
    """A run of ``gpus`` replicas, ``sequences`` on each a step in micro-batches of two.

    Attributes:
        instances: ``--num-distributed-optimizer-instances``: shards in each of so many groups, sums of shards across them.
        bucket: ``--ddp-bucket-size``; None: the recipes' below 120 replicas, from there on Megatron's, 1,000,000 a replica.
    """

    gpus: int
    sequences: int = 8
    instances: int = 1
    bucket: int | None = None

    @property
    def buckets(self) -> float:
        """Of a step's gradients."""
        return ELEMENTS / (self.bucket or max(BUCKET_ELEMENTS, 1_000_000 * self.gpus))

    @property
    def ranks(self) -> int:
        """GPUs of an instance, which are neighbours."""
        return self.gpus // self.instances

    def ring(self, gradient_bytes: float, rate: float, ranks: int, hosts: int) -> float:
        """Reduce-scatter, or gather, ``gradient_bytes`` over ``ranks`` GPUs, as many on each of ``hosts``."""
        if hosts > 1:
            rate = min(rate, ranks / hosts * NETWORK)
        latency = (ranks - hosts) * NVLINK_HOP + (hosts - 1) * NETWORK_HOP
        return gradient_bytes * (ranks - 1) / ranks / rate + self.buckets * latency

    @property
    def reduction(self) -> float:
        """All gradients, in fp32: scattered in each instance, and shards summed (scattered, gathered) across instances."""
        across = self.ring(4 * ELEMENTS / self.ranks, REDUCES, self.instances, min(self.instances, hosts_of(self.gpus)))
        return self.ring(4 * ELEMENTS, REDUCES, self.ranks, hosts_of(self.ranks)) + 2 * across

    @property
    def gathering(self) -> float:
        """All weights, in bf16."""
        return self.ring(2 * ELEMENTS, GATHERS, self.ranks, hosts_of(self.ranks))

    @property
    def exposed(self) -> float:
        """What no computation hides."""
        tail = (PARTS["embedding"] / ELEMENTS + 1 / self.buckets) * (self.reduction + self.gathering)
        return tail + max(0.0, self.reduction - HIDES_REDUCTION) + max(0.0, self.gathering - HIDES_GATHERING)

    @property
    def waiting(self) -> float:
        """Share of a step: the expected slowest of n normal draws (Blom's approximation)."""
        return APART * NormalDist().inv_cdf((self.gpus - 0.375) / (self.gpus + 0.25))

    def step(self, one: float) -> float:
        """A step, where that of one GPU and eight sequences is ``one``."""
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
