"""`quire serve MODEL`: serve a model over HTTP and gRPC."""

import argparse
import asyncio
import dataclasses
import os
import sys
from pathlib import Path

from quire.cli import engine_knobs
from quire.server.config import ServerConfig
from quire.server.keys import Keys


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until a signal stops the process."""
    config = ServerConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ServerConfig)})
    keys = Keys.read(given=_given(args.api_key, "QUIRE_API_KEY"), file=args.api_key_file)
    given = _given(args.admin_key, "QUIRE_ADMIN_KEY")
    admin_keys = Keys.read(given=given, file=args.admin_key_file, flag="--admin-key")
    knobs = engine_knobs(args)
    try:  # only now: they take seconds, and a wrong flag should not
        from quire.server.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: serving needs `pip install 'quire[server]'`") from None
    from quire.llm import LLM

    def ready(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    path = Path(args.model)
    here = path.resolve() if path.exists() else Path(args.model.partition("@")[0])  # else on the hub, pinned
    model_name = here.stem if here.suffix == ".gguf" else here.name
    asyncio.run(serve(lambda: LLM(args.model, **knobs), model_name, config, keys, admin_keys, on_ready=ready))
    return 0


def _given(flags: list[str], variable: str) -> list[str]:
    """Keys from the command line, where other users of the machine can read them, or from the environment."""
    return flags or [key for key in [os.environ.get(variable, "")] if key]
