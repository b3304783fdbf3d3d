"""The persistent compilation cache: a second start finds its programs ready."""

import logging
import os
from pathlib import Path

import jax

_log = logging.getLogger("quire")


def use_compile_cache(folder: str | None) -> None:
    """Keep compiled programs in `folder`; None for the user's cache folder, '' for nowhere.

    JAX has one such cache per process: a program that has chosen one already keeps its choice.
    """
    if folder == "" or jax.config.jax_compilation_cache_dir:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(folder) if folder else base / "quire" / "xla"
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # others could replace JAX's own files
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # a read-only home, a full disk
        _log.warning("compile_cache cannot be used (%s): every start compiles its programs anew", error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
