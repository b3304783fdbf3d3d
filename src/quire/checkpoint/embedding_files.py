"""How a model embeds, from the files of sentence-transformers beside it: modules.json and 1_Pooling/config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.checkpoint.json_file import read_json, read_json_list
from quire.embedding import EmbeddingConfig, Pooling

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
SUPPORTED = ("Transformer", "Pooling", "Normalize")
MODES: Mapping[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


def embedding_config_of_folder(folder: Path) -> EmbeddingConfig:
    """What the folder says; ValueError where an embedding would need what is not there."""
    normalize = True
    if (folder / MODULES).exists():
        # The name of a Python class says what a module is: only its last part is looked at, and nothing is imported.
        kinds = [_kind(module) for module in read_json_list(folder / MODULES)]
        for kind in kinds:
            if kind not in SUPPORTED:
                raise ValueError(
                    f"{MODULES}: a module of type {kind[:64]!r} is not supported; {', '.join(SUPPORTED)} are"
                )
        normalize = "Normalize" in kinds
    path = folder / POOLING
    return EmbeddingConfig(_pooling(read_json(path)) if path.exists() else "last", normalize)


def _kind(module: Any) -> str:
    kind = module.get("type") if isinstance(module, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{MODULES} must hold objects with a type")
    return kind.rpartition(".")[2]


def _pooling(config: Mapping[str, Any]) -> Pooling:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in MODES:
        named = ", ".join(modes)[:200] or "none"
        raise ValueError(f"{POOLING}: pooling by {named} is not supported; one of {', '.join(MODES)} is")
    return MODES[modes[0]]
