"""From what a person calls a model to its config, weights and tokenizer.

MODEL is a folder (config.json, safetensors, tokenizer.json), a GGUF file, or a hub id with the commit it is pinned to,
`org/name@<40 hex digits>`. Nothing in any of them is executed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh

from quire.checkpoint.gguf_file import GgufFile
from quire.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from quire.checkpoint.safetensors_folder import SafetensorsFolder
from quire.checkpoint.tokenizer_files import tokenizer_from_folder
from quire.config import ModelConfig
from quire.device.models.layers import Params
from quire.device.models.weights import load_params
from quire.text.tokenizer import Tokenizer

HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched of a hub repository; code is not."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>.*))?")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None


def load_model(
    model: str | Path, *, mesh: Mesh, dtype: str, progress: Callable[[int, int], None] | None = None
) -> LoadedModel:
    """Read a model and place its weights on the mesh."""
    path = find_model(model)
    if path.is_dir():
        with SafetensorsFolder(path) as folder:
            config = folder.config()
            tokenizer = tokenizer_from_folder(path) if (path / "tokenizer.json").exists() else None
            return LoadedModel(
                config, load_params(config, folder.read, mesh=mesh, dtype=dtype, progress=progress), tokenizer
            )
    file = GgufFile(path)
    tokenizer = tokenizer_from_gguf(file.reader)
    params = load_params(file.config(), file.read, mesh=mesh, dtype=dtype, progress=progress)
    return LoadedModel(file.config(), params, tokenizer)


def find_model(model: str | Path) -> Path:
    """The folder or GGUF file a MODEL means, fetched from the hub if need be."""
    path = Path(model).expanduser().absolute()
    if path.is_dir() or path.is_file():
        return path
    hub = _HUB_ID.fullmatch(str(model))
    if hub is None or str(model).startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise ValueError(
            f"MODEL {str(model)!r} does not exist; give a folder, a GGUF file or a hub id (org/name@commit)"
        )
    if not re.fullmatch(r"[0-9a-f]{40}", hub["revision"] or ""):
        raise ValueError(
            f"MODEL {str(model)!r} is no folder or file; as a hub id it must be pinned to one commit, "
            f"{hub['repo']}@<40 hex digits>, so that every file comes from the same one"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub["repo"], revision=hub["revision"], allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the client raises a dozen kinds: offline, no such repository, no such commit, ...
        raise ValueError(f"MODEL {str(model)!r} could not be fetched: {type(error).__name__}: {error}") from error
