"""Paged attention: one entry point, one readable reference, one file per backend.

A backend owns the layout of the KV arrays: it declares their shapes and page axis, writes a step's K and V and attends.
It runs inside `shard_map`, each device with its own KV heads, because custom kernels do not partition by themselves.
"""

from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from quire.config import ModelConfig
from quire.device.inputs import BatchLayout
from quire.device.mesh import partition

Shape = tuple[int, ...]


@runtime_checkable
class Backend(Protocol):
    """What a backend module provides."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Names of the axes, K's and V's alike; one of them is "pages", the sharding rules know "kv_heads"."""
        ...

    def shapes(self, model: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> tuple[Shape, Shape]:
        """Of one layer's K array and of its V array."""
        ...

    def write_and_attend(
        self,
        kv: tuple[jax.Array, ...],
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        layout: BatchLayout,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Write this step's K and V, then attend causally over each row's KV. Returns the output and the new arrays."""
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
    why_not = native.why_not(model) if platform == "cpu" else f"the native kernel runs on a CPU, not on a {platform}"
    if why_not is None:
        return "native", None
    if knob == "native":
        raise ValueError(f"attention='native': {why_not}; attention='auto' takes what there is")
    return "xla", why_not if platform == "cpu" else None


def paged_attention(
    backend: Backend,
    mesh: Mesh,
    kv: tuple[Float[Array, "..."], ...],
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    layout: BatchLayout,
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "T N H"], tuple[Float[Array, "..."], ...]]:
    """The one way a model attends: heads split over the mesh, the batch layout whole on every device."""
    heads, kv_spec = partition(None, "kv_heads", None), partition(*backend.axes)
    run = jax.shard_map(
        partial(backend.write_and_attend, scale=scale, window=window),
        mesh=mesh,
        in_specs=((kv_spec, kv_spec), heads, heads, heads, PartitionSpec()),
        out_specs=(heads, (kv_spec, kv_spec)),
        check_vma=False,
    )
    return run(kv, q_TNH, k_TKH, v_TKH, layout)
