"""The config of a model from whatever there is of it: a folder, its config.json alone, or a GGUF file. No weights."""

from pathlib import Path

from quire.config import ModelConfig


def read_model_config(path: Path) -> ModelConfig:
    """What a folder, a JSON file like config.json, or a GGUF file says of a model; ValueError if it does not run."""
    from quire.checkpoint.safetensors_folder import config_of_file, config_of_folder

    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"MODEL {str(path)!r} has no config.json; give a folder that has one, or a file")
        return config_of_folder(path)
    if path.suffix == ".json" and path.is_file():
        return config_of_file(path)
    if path.is_file():
        from quire.checkpoint.gguf_file import GgufFile

        return GgufFile(path).config()
    raise ValueError(
        f"MODEL {str(path)!r} is not on disk; give a folder with config.json, a config.json or a GGUF file (quire pull "
        "fetches a model of the hub)"
    )
