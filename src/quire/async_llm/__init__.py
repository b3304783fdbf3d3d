"""An LLM for asyncio programs and servers: one engine on a thread of its own, for tasks of any event loop.

Owns the engine's thread, the requests that have not ended and how many may wait. Refuses to know: protocols, keys.
It needs no extra. jax is imported with `AsyncLLM`, and not before.
"""

from typing import TYPE_CHECKING

from quire.async_llm.errors import DeadlineError, GenerationError, OverloadError, UnavailableError

if TYPE_CHECKING:
    from quire.async_llm.async_llm import AsyncLLM

__all__ = ["AsyncLLM", "DeadlineError", "GenerationError", "OverloadError", "UnavailableError"]


def __getattr__(name: str) -> object:
    if name != "AsyncLLM":
        raise AttributeError(f"module 'quire.async_llm' has no attribute {name!r}")
    from quire.async_llm.async_llm import AsyncLLM

    return AsyncLLM
