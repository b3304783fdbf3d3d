"""What the leader and its followers say to each other, and how an array is cut for a follower.

leader to follower                             follower to leader
connect, address     join jax there            ack            done, where the leader waits for it
start, pool          build a runner, warm up   beat, count    alive, with so many commands done
run, StepInputs      one step                  error, text    it cannot go on
set_weights; bytes   other weights follow
load; set_loaded     read the file; take it
sleep, wake, zero    as a `Runner` has them
close                the end
beat                 alive
failed, reason       the group has failed
"""

from jax.sharding import Mesh, NamedSharding

from quire.config import WindowPoolSize
from quire.device.inputs import (
    BatchLayout,
    PageCommands,
    PageIds,
    RoundInputs,
    SampleInputs,
    StepInputs,
    WindowInputs,
    WindowLayout,
)
from quire.distributed.codec import Codec

CODEC = Codec(
    StepInputs,
    BatchLayout,
    WindowLayout,
    PageIds,
    SampleInputs,
    RoundInputs,
    PageCommands,
    WindowInputs,
    WindowPoolSize,
)
BEAT_S = 1.0
CHUNK_LEN = 16 << 20
"""Bytes of weights in one message."""
BEAT = CODEC.encode(("beat",))

Index = tuple[slice, ...]


def pieces_of(process: int, placed: NamedSharding, shape: tuple[int, ...]) -> list[Index]:
    """Which parts of an array the devices of a process hold, each once: in the same order wherever it is asked."""
    indices = placed.devices_indices_map(shape)
    mesh = placed.mesh
    assert isinstance(mesh, Mesh)
    own = (indices[device] for device in mesh.devices.flat if device.process_index == process)
    return list(dict.fromkeys(whole_index(index, shape) for index in own))


def whole_index(index: Index | None, shape: tuple[int, ...]) -> Index:
    """An index with both ends of every slice."""
    return tuple(slice(*one.indices(length)) for one, length in zip(index or (), shape, strict=True))
