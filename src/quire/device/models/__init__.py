"""Models: one file per architecture, the layers they share, and the loaders of their weights."""

from importlib import import_module

from quire.device.models.architecture import Architecture

NAMES = (
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""The architectures that run: each is a file of this folder, and a line here."""
ARCHITECTURES: dict[str, Architecture] = {
    name: import_module(f"quire.device.models.{name}").ARCHITECTURE for name in NAMES
}
_BY_MODEL_TYPE = {other: known for known in ARCHITECTURES.values() for other in (known.name, *known.model_types)}


def get_architecture(name: str) -> Architecture:
    """An architecture by the name in `ModelConfig.architecture`, or by a `model_type` that means it."""
    if name not in _BY_MODEL_TYPE:
        raise ValueError(f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    return _BY_MODEL_TYPE[name]
