"""The compiled programs of an engine's steps on the disk: a start that finds them traces and compiles none of them.

JAX's own compile cache knows a program by what tracing it gave, and tracing is most of what a warm start would take.
Here a program is known by everything that decides what tracing gives: the files of this package, the versions, the
machine, JAX's settings, and the types of all arguments. The files live in a folder of that cache.

A saved program is machine code and a pickle of JAX's: another user able to write it could run code as the user. The
folder and the file must therefore belong to the user and not be writable by others. Folders above it may be, as volumes
of containers are: the folder is opened and checked at every load, and files are opened relative to its descriptor, so
that a folder put in its place has no effect.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.extend.mlir import ir

from quire.device.inputs import StepShape
from quire.device.native import LIBRARY
from quire.device.programs import Programs

FOLDER = "quire-programs"
MAX_BYTES = 1 << 30
"""Of all saved programs together; the longest unused go first."""
DIGEST_BYTES = 32

_log = logging.getLogger("quire")
_compiling = threading.local()


class SavedPrograms:
    """The programs of step shapes, as far as they are saved; several threads may load and compile at once."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._folder = _usable_folder() if jax.process_count() == 1 else None
        self._identity = _identity(programs) if self._folder else ""

    def load(self, shape: StepShape) -> jax.stages.Compiled | None:
        """The program of a shape; None if it is not saved, or what is saved is damaged."""
        if self._folder is None:
            return None
        path = self._path(shape)
        try:
            with _opened(self._folder) as folder:
                data = _read_own(folder, path.name)
        except OSError:
            return None
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            _log.warning("a saved program is damaged and is compiled again: %s", path.name)
            return None
        devices = list(self._programs.mesh.devices.flat)
        in_tree, out_tree = self._trees(shape)
        try:
            return serialize_executable.deserialize_and_load(content, in_tree, out_tree, devices[0].client, devices)
        except Exception as error:  # whatever XLA or JAX finds wrong, the program can be compiled
            _log.warning("a saved program cannot be loaded and is compiled again: %s", error)
            return None

    def compile(self, shape: StepShape, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the program of a shape, and save it, unless it came from JAX's cache: XLA cannot save it twice.

        (What XLA for CPUs has loaded it serializes without its functions; running that says "Function ... not found".)
        """
        _compiling.is_found = False
        if self._folder is not None and self._programs.mesh.devices.flat[0].platform == "cpu":
            # A name that JAX's cache does not have: it may have the same program, from other files of this package or
            # another knob, and what comes from there cannot be saved.
            module: Any = lowered.compiler_ir()
            with module.context:
                module.operation.attributes["sym_name"] = ir.StringAttr.get(f"step_{self._path(shape).stem}")
        compiled = lowered.compile()
        if self._folder is not None and not _compiling.is_found:
            try:
                content, *trees = serialize_executable.serialize(compiled)
                if trees == self._trees(shape):
                    with _opened(self._folder) as folder:
                        _write(folder, self._path(shape).name, hashlib.sha256(content).digest() + content)
            except OSError as error:
                _log.warning("a program cannot be saved (%s): the next start traces it again", error.strerror)
            except Exception as error:  # it calls back into Python, or XLA has no form for it on this platform
                _log.debug("a program cannot be saved: %s", error)
        return compiled

    def _trees(self, shape: StepShape) -> list[Any]:
        """How the arguments and the results of a program nest."""
        programs = self._programs
        arguments = (programs.params, programs.caches, *programs.inputs(shape))
        return [jax.tree.structure((arguments, {})), jax.tree.structure((programs.caches, programs.output(shape)))]

    def _path(self, shape: StepShape) -> Path:
        assert self._folder is not None
        identity = hashlib.sha256(f"{self._identity}\n{shape!r}\n{self._programs.inputs(shape)}".encode())
        return self._folder / f"{identity.hexdigest()}.program"


def _identity(programs: Programs) -> str:
    """Everything that decides a program but the shape of its step."""
    arrays, tree = jax.tree.flatten((programs.params, programs.caches))
    parts = (
        *_surroundings(),
        sorted((name, repr(getattr(jax.config, name, None))) for name in jax.config.values),
        [(device.id, device.device_kind) for device in programs.mesh.devices.flat],
        _in_full(programs),
        programs.statics.native,
        _in_full(programs.statics.backend),
        tree,
        [(array.shape, array.dtype, array.sharding) for array in arrays],
    )
    return "\n".join(map(str, parts))


def _in_full(value: Any) -> str:
    """A value by all that is in it: what configs say of themselves leaves out what is long, and defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(f'{name}={_in_full(getattr(value, name))}' for name in names)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_in_full(key)}: {_in_full(one)}' for key, one in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_in_full, value))}]"
    return repr(value)


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """The files that programs are made from, the versions and the machine."""
    package, here = hashlib.sha256(), Path(__file__).parent
    for path in [*sorted(here.rglob("*.py")), here.parent / "config.py", LIBRARY]:
        if path.exists():
            package.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    client = jax.devices()[0].client
    return package.hexdigest(), jax.__version__, version("jaxlib"), client.platform_version, _processor(), *flags


def _processor() -> str:
    """What instructions the machine has, as far as it says: code for others must not run here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _usable_folder() -> Path | None:
    """Where programs are saved; None if there is no compile cache, or others could write to it."""
    base = jax.config.jax_compilation_cache_dir
    if not base or "://" in base:
        return None
    folder = Path(base).absolute() / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(folder):
            return folder
    except OSError:  # use_compile_cache or _opened has logged it
        return None


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder; OSError, after a log line, if it is a link or others may change what is in it."""
    unused = "saved programs are not used; "
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        message = "compile_cache: %s cannot be opened, or is a link (%s): " + unused
        _log.warning(message + "choose another folder with compile_cache", folder, error.strerror)
        raise
    try:
        if not _is_own(os.fstat(descriptor)):
            message = "compile_cache: %s belongs to another user or others may write to it: " + unused
            _log.warning(message + "run chmod go-w on it, or choose another folder with compile_cache", folder)
            raise PermissionError(folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_own(status: os.stat_result) -> bool:
    """Whether a file or a folder belongs to this user, and no other user but root may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read_own(folder: int, name: str) -> bytes:
    """The content of a file, which counts as used; OSError if it is a link, another user's, or others may write to it.

    `folder` is a descriptor.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        if not _is_own(status) or not stat.S_ISREG(status.st_mode):
            _log.warning("a saved program belongs to another user or others may write to it: %s", name)
            raise PermissionError(name)
        os.utime(file.fileno())
        return file.read()


def _write(folder: int, name: str, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, and keep the folder bounded. `folder` is a descriptor."""
    with os.scandir(folder) as entries:
        kept = [(entry.stat(), entry.name) for entry in entries if entry.name.endswith(".program")]
    total = len(data)
    for status, old in sorted(kept, key=lambda file: file[0].st_mtime, reverse=True):
        total += status.st_size
        if total > MAX_BYTES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old, dir_fd=folder)
    part = f"{secrets.token_hex(8)}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(part, flags, mode=0o600, dir_fd=folder), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(part, dir_fd=folder)
            raise


def _on_event(event: str, **metadata: object) -> None:
    """JAX calls this on the thread that compiles."""
    if event == "/jax/compilation_cache/cache_hits":
        _compiling.is_found = True


jax.monitoring.register_event_listener(_on_event)
