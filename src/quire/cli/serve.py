"""`quire serve MODEL`: serve a model over HTTP and gRPC."""

import argparse
import asyncio
import os
from functools import partial
from pathlib import Path

from quire.checkpoint.hub import parse_name
from quire.cli import check_chat_template, engine_knobs, knobs_of
from quire.config import EngineConfig
from quire.server.config import ServerConfig
from quire.server.keys import Keys, key_limits


def run(args: argparse.Namespace) -> int:
    """Load the model and serve it until a signal stops the process."""
    config = ServerConfig(**knobs_of(ServerConfig, args))
    keys = Keys(_given(args.api_key, "QUIRE_API_KEY"), args.api_key_file, limits=key_limits(config))
    given = _given(args.admin_key, "QUIRE_ADMIN_KEY")
    admin_keys = Keys(given=given, file=args.admin_key_file, flag="--admin-key", fields=("name",))
    knobs = engine_knobs(args)
    EngineConfig(**knobs)  # checked before anything is loaded or listens
    check_chat_template(args)
    try:  # only now: they take seconds, and a wrong flag should not
        from quire.server.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: serving needs `pip install 'quire-llm[server]'`") from None
    from quire.async_llm.async_llm import engine_meshes
    from quire.llm import LLM

    loads = [
        partial(LLM, args.model, revision=args.revision, chat_template=args.chat_template, **knobs | {"mesh": mesh})
        for mesh in engine_meshes(args.mesh)
    ]
    name = model_name(args.model, args.revision)
    asyncio.run(serve(loads, name, config, keys, admin_keys))
    return 0


def model_name(model: str, revision: str | None) -> str:
    """What clients call it: the last part of its name on the hub, or of its path."""
    path = Path(os.path.abspath(model))  # not resolved: files of the hub's cache are links to names that are hashes
    if not path.exists() and (name := parse_name(model, revision)) is not None:
        return name.repo.partition("/")[2]
    return path.stem if path.suffix == ".gguf" else path.name


def _given(flags: list[str], variable: str) -> list[str]:
    """Keys from the command line, where other users of the machine can read them, or from the environment."""
    return flags or [key for key in [os.environ.get(variable, "")] if key]
