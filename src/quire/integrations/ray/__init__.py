"""Quire in a Ray cluster: replicas behind Ray Serve's proxy, and datasets through Ray Data.

    serve.run(build_app("Qwen/Qwen3-0.6B", num_replicas=2))
    ds.map_batches(QuireProcessor, fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B"}, concurrency=2, batch_size=256)

`pip install 'quire-llm[ray]'`; nothing else of Quire imports Ray. A request's way through Serve:

    Serve's proxy -> Ingress: key, names of the prompt's pages -> PrefixRouter: an engine -> EngineReplica: its server
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.integrations.ray.app import build_app
    from quire.integrations.ray.processor import QuireProcessor

__all__ = ["QuireProcessor", "build_app"]

_HOME = {"QuireProcessor": "processor", "build_app": "app"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        message = f"{__name__} needs Ray: pip install 'quire-llm[ray]'"
        raise ModuleNotFoundError(message, name=error.name) from None
