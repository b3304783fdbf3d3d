"""Everything a scheduler is made from: its limits, and the pools of pages it owns. Plain numbers, no device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config import WindowPoolSize
from quire.core.page_pool import PagePool, WindowPool
from quire.core.page_tables import PageTables
from quire.core.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What decides beside the requests. Two schedulers of the same config, told the same, decide the same."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_samples: int
    max_rounds: int = 1
    drafts: int = 0
    draft_len: int = 0
    """Positions that a draft model knows; 0 where there is none, and drafts are looked up."""
    preemption: str = "auto"
    prefix_cache: bool = True
    poison_freed: bool = False
    num_host_pages: int = 0
    windows: tuple[WindowPoolSize, ...] = ()
    """The pools of layers that see a window."""
    window_host_pages: tuple[int, ...] = ()
    """Their pages in host memory."""

    def build[S: Scheduler](self, kind: Callable[..., S] = Scheduler, **more: Any) -> S:
        """A scheduler over empty pools; of another class, which may take `more`."""
        limits = ("max_num_seqs", "max_num_batched_tokens", "max_num_samples", "max_rounds", "preemption")
        drafts = {name: getattr(self, name) for name in ("drafts", "draft_len")}
        return kind(self._tables(), **{name: getattr(self, name) for name in limits}, **drafts, **more)

    def _tables(self) -> PageTables:
        knobs = {"prefix_cache": self.prefix_cache, "poison_freed": self.poison_freed}
        on_host = self.window_host_pages or (0,) * len(self.windows)
        windows = [
            WindowPool(
                size.window,
                size.num_pages,
                self.page_size,
                pages_per_row=size.pages_per_row,
                num_host_pages=num_host_pages,
                **knobs,
            )
            for size, num_host_pages in zip(self.windows, on_host, strict=True)
        ]
        pool = PagePool(self.num_pages, self.page_size, num_host_pages=self.num_host_pages, **knobs)
        return PageTables(pool, windows)
