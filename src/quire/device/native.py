"""The native library: found, loaded and registered with XLA here, and nowhere else.

It is built with the package when there is a compiler. Without it Quire runs in plain XLA, and
`unavailable_reason` says why.
Importing this module loads nothing and never fails.
"""

import ctypes
import functools
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

LIBRARY = Path(__file__).with_name("_native.so")
HANDLERS = (
    "quire_allocate",
    "quire_attention",
    "quire_pack",
    "quire_linear_bf16",
    "quire_linear_int8",
    "quire_grouped",
    "quire_grouped_int8",
    "quire_grouped_mxfp4",
    "quire_linear_blocked",
    "quire_grouped_blocked",
    "quire_look_up_blocked",
    "quire_pack_nearest",
    "quire_add_norm",
    "quire_rotate",
    "quire_gate",
    "quire_sample",
)
"""The library's XLA handlers: each is a target of `jax.ffi.ffi_call` under its own name."""


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The library, its handlers registered; or in one sentence why not."""
    if not LIBRARY.exists():
        return "the native library was not built: install a wheel of quire-llm, or use a C++ compiler"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name in HANDLERS:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
        library.quire_instruction_set.restype = ctypes.c_char_p
        library.quire_pack_stored.argtypes = [ctypes.c_int, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 3]
        library.quire_pack_stored.restype = None
    except (OSError, AttributeError, RuntimeError) as error:
        return f"the native library does not load, build it again: {error}"
    return library


def unavailable_reason() -> str | None:
    """Why the native library cannot be used, in one sentence; None when it can."""
    library = _load()
    return library if isinstance(library, str) else None


def unavailable_reason_on(mesh: Mesh) -> str | None:
    """Why the native library cannot compute on a mesh, in one sentence; None when it can: on one CPU device."""
    platform = mesh.devices.flat[0].platform
    if platform != "cpu":
        return f"the native library runs on a CPU, not on a {platform}"
    if mesh.size > 1:
        return f"the native matmul runs on one device, not on {mesh.size}"
    return unavailable_reason()


def instruction_sets() -> tuple[str, ...]:
    """What the library can use on this machine, from the plainest to the one it takes by itself."""
    library, found = _load(), []
    if not isinstance(library, str):
        while (name := library.quire_instruction_set(ctypes.c_int(len(found)))) is not None:
            found.append(name.decode())
    return tuple(filter(None, found))


def pack_stored(stored_as: int, inner: int, data: np.ndarray, rows: np.ndarray, panels: np.ndarray) -> None:
    """Rows of a GGUF file's tensor, uint8 `[out, bytes of a row]`, to the panels of a `Blocked` matrix, on the host.

    `stored_as` is a number of `blocked.Format`. No program of XLA: a file is read a tensor at a time from where it is
    mapped, and each into its place.
    """
    library = _load()
    assert not isinstance(library, str), library
    assert data.dtype == panels.dtype == np.uint8
    assert data.flags.c_contiguous
    assert panels.flags.c_contiguous
    assert 0 <= rows.min() <= rows.max() < len(data)
    rows = np.ascontiguousarray(rows, np.int32)
    pointers = (array.ctypes.data for array in (data, rows, panels))
    library.quire_pack_stored(stored_as, inner, len(rows), *pointers)
