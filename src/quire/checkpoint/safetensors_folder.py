"""Weights from a folder of safetensors files, memory-mapped: a tensor's bytes are read when it is placed."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from quire.checkpoint import mxfp4
from quire.checkpoint.json_file import read_json
from quire.checkpoint.weight_index import INDEX, indexed_files, why_not_weights
from quire.config import ModelConfig
from quire.device.models import get_architecture
from quire.device.models.weight_specs import TensorSpec

NUMBER_TYPES = ("F64", "F32", "F16", "BF16")
BYTES = ("U8",)
"""Of a tensor that is quantised."""


def config_of_folder(folder: Path) -> ModelConfig:
    """What config.json says; ValueError where it is a model that does not run."""
    return config_of_file(folder / "config.json")


def config_of_file(path: Path) -> ModelConfig:
    """What such a file says, whatever it is called."""
    hf = read_json(path)
    if "model_type" not in hf:
        raise ValueError(f"{path.name} has no model_type, which says what the model's architecture is")
    config = get_architecture(str(hf["model_type"])).config(hf)
    quantization = hf.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method is not None and method != "mxfp4":
        raise ValueError(f"config.json: weights quantised by {method!r} are not supported; take the model they are of")
    return config


class SafetensorsFolder:
    """One checkpoint. A context manager: the files are mapped while it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._home: dict[str, Any] = {}
        names = sorted(folder.glob("*.safetensors"))
        if (folder / INDEX).exists():
            # The index says which files belong to the model; other files beside them are not its weights.
            listed = set(indexed_files(folder))
            if missing := listed - {path.name for path in names}:
                some = ", ".join(sorted(missing)[:4])
                raise ValueError(f"{folder.name}: {INDEX} lists {some}, which the folder does not have; fetch it again")
            names = [path for path in names if path.name in listed]
        if not names:
            others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
            has = f", it has {others[0]}" if others else ""
            raise ValueError(
                f"{folder.name}: no .safetensors file in this folder{has}; save the weights as safetensors, or take a "
                "repository that has them"
            )
        for path in names:
            try:
                file = self._files.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                self._files.close()
                reason = error.strerror if isinstance(error, OSError) else why_not_weights(path) or error
                raise ValueError(f"{path.name} is not a safetensors file: {reason}") from error
            names_in_file: list[str] = file.keys()
            self._home.update({_text_name(name): (file, name) for name in names_in_file})

    def config(self) -> ModelConfig:
        """What config.json says."""
        return config_of_folder(self.folder)

    def read(self, tensor: TensorSpec) -> np.ndarray:
        """One tensor of a model."""
        return self.tensor(tensor.name)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor by its name; one that is there in MXFP4 is expanded."""
        if name not in self._home and f"{name}_blocks" in self._home:
            blocks, scales = (self._stored(f"{name}_{part}", BYTES) for part in ("blocks", "scales"))
            return mxfp4.expand(name, blocks, scales)
        return self._stored(name, NUMBER_TYPES)

    def _stored(self, name: str, types: tuple[str, ...]) -> np.ndarray:
        short_name = name.removeprefix("model.")  # of a model that was saved without its head, as some that embed are
        if name not in self._home and short_name in self._home:
            name = short_name
        if name not in self._home:
            raise ValueError(f"{self.folder.name}: no tensor {name!r} in its safetensors files")
        file, stored_name = self._home[name]
        kind = file.get_slice(stored_name).get_dtype()
        if kind not in types:
            raise ValueError(f"tensor {name} has type {kind}; supported are {', '.join(types)}")
        return file.get_tensor(stored_name)

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._home.clear()
        self._files.close()


def _text_name(name: str) -> str:
    """A tensor of the text model by the name it has in a model of text alone, where there are images beside it."""
    if name.startswith("model.language_model."):
        return name.replace("language_model.", "", 1)
    return name.removeprefix("language_model.")
