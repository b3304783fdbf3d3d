"""How fast a step can be at best: the largest of what memory, arithmetic and the interconnect take.

Nothing is this fast. The three are counted as if each ran at its peak and all at the same time, and what a program
does beside matmuls, attention and all-reduces is not counted at all. It says what cannot be exceeded, and which of the
three to look at first.
"""

from dataclasses import dataclass
from typing import Literal

from quire.capacity.topology import Topology

Limit = Literal["memory", "compute", "interconnect"]

LOGITS_ITEMSIZE = 4
"""Logits are float32."""


@dataclass(frozen=True)
class LayerKinds:
    """Layers that attend alike."""

    count: int
    kv_bytes_per_token: int
    """Of one such layer, on one device."""
    num_heads: int
    """Query heads of one device."""
    head_dim: int
    window: int | None

    def visible(self, context: int) -> int:
        """Positions that a token sees at this length of context."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class Work:
    """What a step reads and computes on one device, and sums over all."""

    matmul_bytes: int
    """Weights of matmuls: all but the table of embeddings."""
    matmul_params: int
    """Numbers in them."""
    unembed_params: int
    """Those among them that are multiplied once for a sample."""
    vocab_size: int
    """Logits of one sample on one device."""
    hidden_size: int
    itemsize: int
    """Bytes of an activation."""
    layers: tuple[LayerKinds, ...]
    expert_bytes: int = 0
    """Weights of experts among those of matmuls."""
    expert_params: int = 0
    """Numbers in them."""
    expert_share: float = 1.0
    """Of all experts, those that one token takes."""

    @property
    def num_layers(self) -> int:
        """All layers."""
        return sum(kind.count for kind in self.layers)

    def bytes_read(self, tokens: int) -> float:
        """Weights that a step of so many tokens reads: of experts those that are taken, if all are equally likely."""
        taken = 1 - (1 - self.expert_share) ** tokens
        return self.matmul_bytes - self.expert_bytes * (1 - taken)

    @property
    def params_per_token(self) -> float:
        """Numbers that are multiplied once for a token, or once for a sample."""
        return self.matmul_params - self.expert_params * (1 - self.expert_share)


@dataclass(frozen=True)
class Collectives:
    """The all-reduces of one step over the slice; none on one device."""

    count: int
    """Two a layer, one for the embedding."""
    array_bytes: int
    """Of the array that each sums: a vector of the model's width for each token."""


@dataclass(frozen=True)
class StepTime:
    """Seconds at best, by what takes them."""

    num_tokens: int
    """Tokens that the step produces, or reads of a prompt."""
    memory: float
    compute: float
    interconnect: float

    @property
    def seconds(self) -> float:
        """The largest of the three."""
        return max(self.memory, self.compute, self.interconnect)

    @property
    def limit(self) -> Limit:
        """Which of the three it is."""
        times: dict[Limit, float] = {"memory": self.memory, "compute": self.compute, "interconnect": self.interconnect}
        return max(times, key=lambda name: times[name])

    @property
    def tokens_per_second(self) -> float:
        """At best."""
        return self.num_tokens / self.seconds


def collectives(work: Work, topology: Topology, num_tokens: int) -> Collectives:
    """The all-reduces of a step of so many tokens."""
    count = 0 if topology.num_devices == 1 else 2 * work.num_layers + 1
    return Collectives(count, num_tokens * work.hidden_size * work.itemsize)


def decode_step(work: Work, topology: Topology, *, rows: int, context: int) -> StepTime:
    """Every row has so many positions of context and gets one token."""
    kv_bytes = sum(kind.count * kind.visible(context) * kind.kv_bytes_per_token for kind in work.layers)
    scores = sum(kind.count * kind.visible(context) * kind.num_heads * kind.head_dim for kind in work.layers)
    return step_time(work, topology, tokens=rows, samples=rows, kv_bytes=rows * kv_bytes, scores=rows * scores)


def prefill_step(work: Work, topology: Topology, *, tokens: int) -> StepTime:
    """The first tokens of one prompt: each sees itself and those before it; the last is drawn from."""
    kv_bytes = sum(kind.count * tokens * kind.kv_bytes_per_token for kind in work.layers)
    scores = sum(
        kind.count * sum(map(kind.visible, range(1, tokens + 1))) * kind.num_heads * kind.head_dim
        for kind in work.layers
    )
    return step_time(work, topology, tokens=tokens, samples=1, kv_bytes=kv_bytes, scores=scores)


def step_time(work: Work, topology: Topology, *, tokens: int, samples: int, kv_bytes: int, scores: int) -> StepTime:
    """A step of any kind. `scores`: numbers of Q that meet one of K; as many of the weights meet one of V."""
    logits_bytes = 2 * samples * work.vocab_size * LOGITS_ITEMSIZE  # written once, read once
    flops = 2 * (tokens * (work.params_per_token - work.unembed_params) + samples * work.unembed_params) + 4 * scores
    sums, chip = collectives(work, topology, tokens), topology.chip
    return StepTime(
        num_tokens=tokens,
        memory=(work.bytes_read(tokens) + kv_bytes + logits_bytes) * chip.devices_per_chip / chip.bandwidth,
        compute=flops * chip.devices_per_chip / chip.flops,
        interconnect=sums.count * topology.all_reduce_seconds(sums.array_bytes),
    )
