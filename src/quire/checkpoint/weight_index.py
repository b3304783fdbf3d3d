"""Which safetensors files belong to a model of several: what its index says."""

from pathlib import Path

from quire.checkpoint.json_file import read_json

INDEX = "model.safetensors.index.json"


def indexed_files(folder: Path) -> list[str]:
    """The files that the index of a folder names, sorted."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{INDEX}: weight_map must be an object")
    return sorted({str(name) for name in weight_map.values()})
