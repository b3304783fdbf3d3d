"""Paged attention: one entry point, one readable reference, one file per backend.

A backend owns the layout of the KV arrays: it declares them for each layer, writes a step's K and V and attends. It
runs inside `shard_map`, each device with its own KV heads, because custom kernels do not partition by themselves.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from quire.config import AttentionConfig, ModelConfig
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec, partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerKV:
    """One layer's KV arrays, as its backend declared them. (A pytree may hold other things than arrays: hence Any.)"""

    arrays: Any
    axes: tuple[tuple[str | None, ...], ...] = field(metadata={"static": True})
    """For each array, the names of its axes."""


@runtime_checkable
class Backend(Protocol):
    """What a backend module provides."""

    def arrays(
        self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> tuple[ArraySpec, ...]:
        """The arrays that keep one layer's KV.

        There may be any number of them, each of its own type. Each has an axis "pages" of length `num_pages`, along
        which whole pages are copied and moved. The mesh splits an axis "kv_heads"; other names are free.
        """
        ...

    def write_and_attend(
        self,
        kv: tuple[jax.Array, ...],
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        layout: BatchLayout,
        attention: AttentionConfig,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Write this step's K and V, then attend causally over each row's KV. Returns the output and the new arrays.

        The arrays hold the heads of one device; `attention` counts those of all.
        """
        ...


def get_backend(name: str) -> Backend:
    """A backend by its name."""
    from quire.device.attention import native, reference, xla

    backends = {"native": native.NativeBackend, "reference": reference.ReferenceBackend, "xla": xla.XlaBackend}
    return backends[name]()


def choose_backend(knob: str, model: ModelConfig, platform: str) -> tuple[str, str | None]:
    """The name of the backend that the config's knob means for this model on such devices.

    Beside it, where "auto" had to do without the native kernel on a CPU, the reason in one sentence.
    """
    from quire.device.attention import native

    if knob not in ("auto", "native"):
        return knob, None
    elsewhere = f"the native kernel runs on a CPU, not on a {platform}"
    reason = native.unavailable_reason(model) if platform == "cpu" else elsewhere
    if reason is None:
        return "native", None
    if knob == "native":
        raise ValueError(f"attention='native': {reason}; attention='auto' takes what there is")
    return "xla", reason if platform == "cpu" else None


def paged_attention(
    backend: Backend,
    mesh: Mesh,
    kv: LayerKV,
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    layout: BatchLayout,
    attention: AttentionConfig,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """The one way a model attends: heads split over the mesh, the batch layout whole on every device."""
    heads, kv_specs = partition(None, "kv_heads", None), tuple(partition(*axes) for axes in kv.axes)
    run = jax.shard_map(
        partial(backend.write_and_attend, attention=attention),
        mesh=mesh,
        in_specs=(kv_specs, heads, heads, heads, PartitionSpec()),
        out_specs=(heads, kv_specs),
        check_vma=False,
    )
    out_TNH, arrays = run(kv.arrays, q_TNH, k_TKH, v_TKH, layout)
    return out_TNH, LayerKV(arrays, kv.axes)
