"""Models: one file per architecture, the layers they share, and the loaders of their weights."""

from quire.device.models import llama, mistral, qwen2, qwen3
from quire.device.models.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in (llama, mistral, qwen2, qwen3)
}


def get_architecture(name: str) -> Architecture:
    """An architecture by the name in `ModelConfig.architecture`."""
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[name]
