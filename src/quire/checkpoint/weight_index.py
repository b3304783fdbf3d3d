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


def why_not_weights(path: Path) -> str | None:
    """Why a file that cannot be read as weights holds none, and what to do; None if its beginning does not say."""
    with path.open("rb") as file:
        start = file.read(24)
    if not start:
        return "it is empty; fetch it again"
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`"
    return None
