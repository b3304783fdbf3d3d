"""The other processes of a group: `follow` is to them what `LLM` is to the first."""

import sys
from pathlib import Path
from typing import Any, Unpack

from quire.checkpoint.load import find_model, load_model, read_config
from quire.config import EngineKnobs, engine_config
from quire.device.compile_cache import use_compile_cache
from quire.distributed.follower import Follower
from quire.distributed.group import facts_of, group_mesh
from quire.engine.build import PoolSizes, build_runner
from quire.engine.validation import max_model_len
from quire.field_error import FieldError


def follow(
    model: str | Path,
    *,
    revision: str | None = None,
    mesh: str | None = None,
    quiet: bool = False,
    **knobs: Unpack[EngineKnobs],
) -> None:
    """Run the steps that process 0 sends, until it closes its LLM; the arguments are those it has, but `process_id`.

    GroupError if it does not come, or refuses this process. What goes wrong later ends the process, with exit code 1
    and the reason on standard error: it may be inside of jax, where nothing can be raised.
    """
    config = engine_config(mesh=mesh, **knobs)
    if config.process_id == 0:
        raise FieldError("process_id=0 leads: open an LLM, AsyncLLM or Rollouts with it", field="process_id")
    path = find_model(model, revision, quiet=quiet)
    model_config = read_config(path)
    follower = Follower(config, facts_of(config, model_config, path))
    try:
        follower.connect()
        devices = group_mesh(config)

        def load() -> Any:
            return load_model(path, mesh=devices, dtype=config.dtype).params

        params = load()
        (pool,) = follower.expect("start")
        use_compile_cache(config.compile_cache)
        length = max_model_len(config.max_model_len, model_config)
        runner = build_runner(config, PoolSizes(*pool), model_config, params, length, devices)
        runner.warm_up()
        if not quiet:
            print(f"quire: process {config.process_id} of {config.num_processes} follows", file=sys.stderr, flush=True)
        follower.run(runner, load)
    except Exception as error:
        follower.leave(f"{type(error).__name__}: {error}")
