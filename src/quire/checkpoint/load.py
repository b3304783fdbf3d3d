"""From what a person calls a model to its config, weights and tokenizer.

MODEL is a folder (config.json, safetensors, tokenizer.json), a GGUF file, or a name on the hub: `org/name`, with a
revision `org/name@v1.0`, of a GGUF repository `org/name:Q4_K_M`. Nothing in any of them is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from quire.checkpoint.embedding_files import embedding_config_of_folder
from quire.checkpoint.gguf_file import GgufFile
from quire.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from quire.checkpoint.hub import fetch_model, parse_name
from quire.checkpoint.json_file import read_json
from quire.checkpoint.safetensors_folder import SafetensorsFolder, config_of_folder
from quire.checkpoint.tokenizer_files import tokenizer_from_folder
from quire.config import ModelConfig
from quire.device.models.layers import Params
from quire.device.models.weights import load_params
from quire.embedding import EmbeddingConfig
from quire.field_error import FieldError
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    """How its authors sample from it, in the words of generation_config.json; not checked."""
    embedding: EmbeddingConfig
    """How it embeds."""


def load_model(
    model: str | Path,
    *,
    mesh: Mesh,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    keep_blocks: bool = False,
    check: Callable[[ModelConfig], None] = lambda config: None,
) -> LoadedModel:
    """Read a model and place its weights on the mesh. `keep_blocks`: in the blocks in which a GGUF file has them.

    `check` is called with the model's config before any weights are read.
    """
    path = find_model(model)
    if path.is_dir():
        if keep_blocks:
            raise FieldError(
                f"quantize='gguf' keeps what a GGUF file stores, and {path.name} is a folder: take quantize='int4'",
                field="quantize",
            )
        with SafetensorsFolder(path) as folder:
            config = folder.config()
            check(config)
            tokenizer = load_tokenizer(path)
            generation = path / "generation_config.json"
            embedding = embedding_config_of_folder(path)
            return LoadedModel(
                config,
                load_params(config, folder.read, mesh=mesh, dtype=dtype, progress=progress),
                tokenizer,
                read_json(generation) if generation.exists() else {},
                embedding,
            )
    file = GgufFile(path)
    check(file.config())
    tokenizer = tokenizer_from_gguf(file.reader)
    params = load_params(
        file.config(),
        file.read,
        mesh=mesh,
        dtype=dtype,
        progress=progress,
        read_stored=file.read_stored if keep_blocks else None,
    )
    return LoadedModel(file.config(), params, tokenizer, file.generation_config(), file.embedding_config())


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder or GGUF file; None if a folder has none. Reads no weights."""
    if path.is_file():
        return tokenizer_from_gguf(GgufFile(path).reader)
    return tokenizer_from_folder(path) if (path / "tokenizer.json").exists() else None


def find_model(model: str | Path, revision: str | None = None, *, quiet: bool = False) -> Path:
    """The folder or GGUF file a MODEL means, fetched from the hub if need be; `quiet` prints nothing of that."""
    if not isinstance(model, str | PathLike) or model == "":
        raise ValueError(f"MODEL {model!r} must be a folder, a GGUF file or a name on the hub, such as org/name")
    path = Path(model).expanduser().absolute()
    if path.is_dir() or path.is_file():
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for models on the hub; {str(model)!r} is on this disk")
        if path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
            named = (
                f"give the file, {str(files[0])!r}"
                if len(files) == 1
                else f"give one of {len(files)}, {str(files[0])!r}"
            )
            raise ValueError(f"MODEL {str(model)!r} is a folder with GGUF files and no config.json: {named}")
        if path.is_dir() and not (path / "config.json").exists():
            adapter = (path / "adapter_config.json").exists()
            what = "holds an adapter: merge it into its model, and give that" if adapter else "has no config.json"
            hint = "" if adapter else "; give the folder of a model, with config.json and .safetensors files"
            raise ValueError(f"MODEL {str(model)!r} is a folder that {what}{hint}")
        return path
    name = parse_name(str(model), revision) if isinstance(model, str) else None
    if name is None or name.repo.endswith((".gguf", ".safetensors")):
        raise ValueError(
            f"MODEL {str(model)!r} does not exist; give a folder, a GGUF file or a name on the hub "
            "(org/name, org/name:Q4_K_M, org/name@commit)"
        )
    return fetch_model(name, quiet=quiet, check=read_config)


def read_config(path: Path) -> ModelConfig:
    """What a folder or GGUF file says of its model; ValueError if it is none that runs. Reads no weights."""
    if path.is_file():
        file = GgufFile(path)
        file.check_types()
        return file.config()
    return config_of_folder(path)
