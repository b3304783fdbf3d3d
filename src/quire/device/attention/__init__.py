"""Paged attention: one entry point, one readable reference, one file per backend.

A backend owns the layout of the KV arrays: it declares them for each layer, writes a step's K and V and attends. It
runs inside `shard_map`, each device with its own KV heads, because custom kernels do not partition by themselves.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from quire.config import AttentionConfig, ModelConfig
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec, partition

PALLAS = ("pallas", "pallas-int8")
"""Names of the kernel for TPUs: with KV in the engine's type, and in int8."""


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
        sinks_N: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Write this step's K and V, then attend causally over each row's KV. Returns the output and the new arrays.

        The arrays hold the heads of one device; `attention` counts those of all. `sinks_N` has, for each query head, a
        score that takes part in every softmax and has no value: what it takes, nobody gets.
        """
        ...


def get_backend(name: str, device_kind: str = "cpu") -> Backend:
    """A backend by its name, for such devices."""
    from quire.device.attention import native, reference, xla

    if name in PALLAS:
        from quire.device.attention import pallas_tpu  # it takes a while to import, and few need it

        return pallas_tpu.PallasBackend(device_kind, int8=name == "pallas-int8")
    backends = {"native": native.NativeBackend, "reference": reference.ReferenceBackend, "xla": xla.XlaBackend}
    backends["xla-rows"] = xla.XlaRowsBackend
    return backends[name]()


def choose_backend(knob: str, model: ModelConfig, platform: str, device_kind: str) -> tuple[str, str | None]:
    """The name of the backend that the config's knob means for this model on such devices.

    Beside it, where "auto" had to do without the kernel of the platform, the reason in one sentence.
    """
    name = {"cpu": "native", "tpu": "pallas"}.get(platform, "xla") if knob == "auto" else knob
    reason = _unavailable_reason(name, model, platform, device_kind)
    if reason is None:
        return name, None
    if knob == "auto":
        return "xla", reason
    raise ValueError(f"attention={knob!r}: {reason}; attention='auto' takes what there is")


def _unavailable_reason(name: str, model: ModelConfig, platform: str, device_kind: str) -> str | None:
    from quire.device.attention import native, pallas_blocks

    if name == "native":
        elsewhere = f"the native kernel runs on a CPU, not on a {platform}"
        return native.unavailable_reason(model) if platform == "cpu" else elsewhere
    if name in PALLAS:
        elsewhere = f"the Pallas kernel runs on a TPU (and in an interpreter on a CPU), not on a {platform}"
        return pallas_blocks.unavailable_reason(device_kind) if platform in ("tpu", "cpu") else elsewhere
    return None


def paged_attention(
    backend: Backend,
    mesh: Mesh,
    kv: LayerKV,
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    layout: BatchLayout,
    attention: AttentionConfig,
    sinks_N: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """The one way a model attends: heads split over the mesh, the batch layout whole on every device."""
    heads, kv_specs = partition(mesh, None, "kv_heads", None), tuple(partition(mesh, *axes) for axes in kv.axes)
    run = jax.shard_map(
        lambda kv, q, k, v, layout, sinks: backend.write_and_attend(kv, q, k, v, layout, attention, sinks),
        mesh=mesh,
        in_specs=(kv_specs, heads, heads, heads, PartitionSpec(), partition(mesh, "kv_heads")),
        out_specs=(heads, kv_specs),
        check_vma=False,
    )
    sinks_N = None if sinks_N is None else sinks_N.astype(jnp.float32)
    out_TNH, arrays = run(kv.arrays, q_TNH, k_TKH, v_TKH, layout, sinks_N)
    return out_TNH, LayerKV(arrays, kv.axes)
