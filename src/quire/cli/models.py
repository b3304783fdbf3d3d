"""`quire models`: the models in the hub's cache folder, and whether Quire runs them."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.checkpoint.hub import missing_weights
from quire.checkpoint.hub_cache import RepoCache, cache_root, repositories
from quire.checkpoint.hub_download import size_text
from quire.checkpoint.load import read_config


def run(args: argparse.Namespace) -> int:
    """Print one line for each model."""
    root = cache_root()
    models = list(_models(root))
    if args.json:
        for model in models:
            print(json.dumps(model))
        return 0
    if not models:
        print(f"no models in {root}; quire pull org/name fetches one")
        return 0
    rows = [("MODEL", "COMMIT", "SIZE", "RUNS")]
    rows += [(m["model"], m["commit"][:7], size_text(m["bytes"]), m["why_not"] or "yes") for m in models]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]))
    return 0


def _models(root: Path) -> Iterator[dict[str, Any]]:
    """What is on disk: a folder of safetensors is one model, and so is each GGUF file."""
    for cache, commit in repositories(root):
        snapshot = cache.snapshot(commit)
        files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
        ggufs = [path for path in files if path.suffix == ".gguf"]
        for path in ggufs:
            name = f"{cache.repo}:{path.relative_to(snapshot).as_posix()}"
            yield _model(cache, name, commit, path, [path])
        rest = [path for path in files if path not in ggufs]
        if rest and (not ggufs or any(path.suffix == ".safetensors" for path in rest)):
            yield _model(cache, cache.repo, commit, snapshot, rest)


def _model(cache: RepoCache, name: str, commit: str, path: Path, files: list[Path]) -> dict[str, Any]:
    why_not = _why_not(path)
    return {
        "model": name,
        "commit": commit,
        "revisions": cache.refs(commit),
        "bytes": sum(file.stat().st_size for file in files),
        "runs": why_not is None,
        "why_not": why_not and f"no: {why_not}",
        "path": str(path),
    }


def _why_not(path: Path) -> str | None:
    """Why a model does not run; None if it does. Reads what it says of itself, not its weights."""
    try:
        read_config(path)
    except ValueError as error:
        return str(error)
    if path.is_dir() and (missing := missing_weights(path)):
        return f"{missing} is not on disk; quire pull fetches it"
    return None
