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
"""Kernels that start later: with it, rows of two and four are met. Idle time is 55 of one, and 68 to 86 of four."""
APART = 0.012
"""Standard deviation of a card's speed: five machines lay 2.8 % apart."""

# Assumed: nothing has been run between hosts.
A_HOST, NETWORK = 8, 45e6
"""GPUs of a host; bytes a millisecond of a GPU's own adapter of 400 Gb/s."""
NVLINK_HOP, NETWORK_HOP = 0.003, 0.012
"""Latency of one step of a ring."""


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

    def ring(self, gradient_bytes: float, rate: float) -> float:
        """Reduce-scatter, or gather, ``gradient_bytes`` over the GPUs that shard them."""
        ranks = self.gpus // self.instances
        hosts = -(-ranks // A_HOST)
        latency = (ranks - hosts) * NVLINK_HOP + (hosts - 1) * NETWORK_HOP
        return gradient_bytes * (ranks - 1) / ranks / rate + self.buckets * latency

    @property
    def reduction(self) -> float:
        """All gradients, in fp32."""
        across = self.instances - 1
        shard = 2 * 4 * ELEMENTS * across / self.instances / (self.gpus // self.instances) / NETWORK
        return self.ring(4 * ELEMENTS, REDUCES) + shard + self.buckets * 2 * across * NETWORK_HOP

    @property
    def gathering(self) -> float:
        """All weights, in bf16."""
        return self.ring(2 * ELEMENTS, GATHERS)

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
        adam = ADAM / (self.gpus // self.instances)
        return computing * (1 + self.waiting) + adam + DIVISION + self.exposed + LATER * share


TABLE = (
    Replicas(2),
    Replicas(4),
    Replicas(8),
    Replicas(64),
    Replicas(512),
    Replicas(512, bucket=BUCKET_ELEMENTS),
    Replicas(512, instances=64),
    Replicas(512, sequences=2),
)
