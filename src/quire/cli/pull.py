"""`quire pull MODEL`: fetch a model from the hub, verify it, and say where it is."""

import argparse

from quire.checkpoint.load import find_model, read_config


def run(args: argparse.Namespace) -> int:
    """Fetch and verify; the path alone goes to standard output."""
    path = find_model(args.model, args.revision)
    read_config(path)  # what does not run here is told now and not when it is served
    print(path)
    return 0
