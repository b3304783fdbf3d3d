"""Weights from a folder of safetensors files, memory-mapped: a tensor's bytes are read when it is placed."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from quire.checkpoint.json_file import read_json
from quire.config import ModelConfig
from quire.device.models import get_architecture
from quire.device.models.weight_specs import TensorSpec

NUMBER_TYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsFolder:
    """One checkpoint. A context manager: the files are mapped while it is open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._home: dict[str, Any] = {}
        names = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            # The index says which files belong to the model; other files beside them are not its weights.
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index.name}: weight_map must be an object")
            listed = {str(name) for name in weight_map.values()}
            names = [path for path in names if path.name in listed]
        if not names:
            raise ValueError(f"{folder.name}: no .safetensors file in this folder")
        for path in names:
            try:
                file = self._files.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                self._files.close()
                reason = error.strerror if isinstance(error, OSError) else error
                raise ValueError(f"{path.name} is not a safetensors file: {reason}") from error
            self._home.update(dict.fromkeys(file.keys(), file))

    def config(self) -> ModelConfig:
        """What config.json says."""
        hf = read_json(self.folder / "config.json")
        return get_architecture(str(hf.get("model_type"))).config(hf)

    def read(self, tensor: TensorSpec) -> np.ndarray:
        """One tensor of a model."""
        return self.tensor(tensor.name)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor by its name."""
        if name not in self._home:
            raise ValueError(f"{self.folder.name}: no tensor {name!r} in its safetensors files")
        kind = self._home[name].get_slice(name).get_dtype()
        if kind not in NUMBER_TYPES:
            raise ValueError(f"tensor {name} has type {kind}; supported are {', '.join(NUMBER_TYPES)}")
        return self._home[name].get_tensor(name)

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._home.clear()
        self._files.close()
