"""The protocol of what watches requests and steps: a server's metrics, its trace, OpenTelemetry."""

from typing import Protocol

from quire.async_llm.stream import Stream
from quire.engine.engine import Engine


class Observer(Protocol):
    """Gets tokens and ends of streams on the event loop that submitted them, and steps on the engine's thread."""

    def on_tokens(self, stream: Stream, index: int, now: float, count: int, /) -> None:
        """So many tokens of a stream's sequence have come; its times are still those of the tokens before."""
        ...

    def on_end(self, stream: Stream, failure: str | None, /) -> None:
        """A stream is over: by itself if `failure` is None, else for that reason."""
        ...

    def on_step(self, engine: Engine, start: float, end: float, is_failed: bool, /) -> None:
        """A step is over. This is called on the engine's thread: every token waits for what is done here."""
        ...
