"""An LLM for asyncio programs and servers: one engine on a thread of its own, for tasks of any event loop.

Owns the engine's thread, the requests that have not ended and how many may wait. Refuses to know: protocols, keys,
tenants. It needs no extra.
"""

from quire.async_llm.async_llm import AsyncLLM
from quire.async_llm.errors import DeadlineError, GenerationError, OverloadError, UnavailableError

__all__ = ["AsyncLLM", "DeadlineError", "GenerationError", "OverloadError", "UnavailableError"]
