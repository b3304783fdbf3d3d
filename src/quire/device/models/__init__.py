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
_BY_GGUF_NAME = {known.gguf_name: known for known in ARCHITECTURES.values() if known.gguf_name}
_BY_GGUF_NAME["llama"] = ARCHITECTURES["llama"]  # files of Mixtral have this name too


def get_architecture(name: str) -> Architecture:
    """An architecture by the name in `ModelConfig.architecture`, or by a `model_type` that means it."""
    if name not in _BY_MODEL_TYPE:
        raise ValueError(f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    return _BY_MODEL_TYPE[name]


def get_gguf_architecture(name: str, *, has_experts: bool) -> Architecture:
    """Return the architecture of a GGUF file whose `general.architecture` is `name`."""
    if name == "llama" and has_experts:
        return ARCHITECTURES["mixtral"]
    if name in _BY_GGUF_NAME:
        return _BY_GGUF_NAME[name]
    if name in _BY_MODEL_TYPE:
        raise ValueError(f"GGUF files of model type {name!r} are not supported; use the model's safetensors")
    supported = ", ".join(sorted(_BY_GGUF_NAME))
    raise ValueError(
        f"GGUF files of model type {name!r} are not supported; supported are {supported}; "
        "safetensors of other model types may be (docs/models.md)"
    )
