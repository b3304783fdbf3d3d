"""How far long work is: a bar in a terminal or a notebook, and now and then a plain line where there is neither."""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

LINE_EVERY_S = 30.0
"""Between two plain lines; work that takes less has none."""
REDRAW_EVERY_S = 0.1


class StartProgress:
    """Steps of getting ready, such as layers loaded or programs compiled; without a bar, one line that it begins."""

    def __init__(self, what: str, unit: str, *, quiet: bool) -> None:
        self._what, self._unit, self._quiet = what, unit, quiet
        self._bar = None if quiet else _bar(what, unit, None)
        self._is_announced = False

    def update(self, done: int, total: int, now: str = "") -> None:
        """So many are done, and this is being done now."""
        if self._bar is not None:
            self._bar.total, self._bar.n = total, done
            self._bar.set_postfix_str(now)
        elif not self._quiet and not self._is_announced:
            self._is_announced = True
            print(f"quire: {self._what} {total} {self._unit}s ...", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


class JobProgress:
    """Sequences done, or what else `unit` counts, tokens a second and time left of a job."""

    def __init__(
        self,
        total: int | None,
        *,
        unit: str = "sequence",
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total` is how many there will be, None if nobody knows."""
        self._total, self._unit, self._quiet, self._clock = total, unit, quiet, clock
        self._bar: Any = None
        self._start: float | None = None
        self._due = self._every = float("inf")
        self._rates = ""
        self._has_lines = False

    def start(self) -> None:
        """The job begins, or is asked for more."""
        if self._quiet or self._start is not None:
            return
        self._start = self._clock()
        self._bar = _bar("generating", self._unit, self._total)
        self._every = LINE_EVERY_S if self._bar is None else REDRAW_EVERY_S
        self._due = self._start + self._every

    def update(self, done: int, count_tokens: Callable[[], tuple[int, int]]) -> None:
        """So many sequences are done; `count_tokens`, prompt tokens and generated ones, is called when it is shown."""
        if self._start is None or (now := self._clock()) < self._due:
            return
        self._due = now + self._every
        seconds = now - self._start
        prompt, generated = (count / seconds for count in count_tokens())
        self._rates = f"{prompt:,.0f} prompt and {generated:,.0f} generated tokens/s"
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_postfix_str(self._rates)
        else:
            self._print(done, self._time_left(done, seconds))

    def close(self, done: int) -> None:
        """Take the bar away, or say how it ended if there were lines before. More calls do nothing."""
        if self._bar is not None:
            self._bar.close()
        elif self._has_lines and self._start is not None:
            self._print(done, f"ended after {_duration(self._clock() - self._start)}")
        self._bar, self._has_lines, self._due = None, False, float("inf")

    def _print(self, done: int, last: str) -> None:
        self._has_lines = True
        of_total = "" if self._total is None else f" of {self._total:,}"
        print(f"quire: {done:,}{of_total} {self._unit}s; {self._rates}; {last}", file=sys.stderr, flush=True)

    def _time_left(self, done: int, seconds: float) -> str:
        if self._total is None or not done:
            return f"{_duration(seconds)} so far"
        return f"{_duration(seconds / done * max(self._total - done, 0))} left"


def _duration(seconds: float) -> str:
    """In words: 12 s, 3 min 20 s, 2 h 5 min."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _bar(what: str, unit: str, total: int | None) -> Any:
    """A bar of tqdm, in a notebook one of its own; None where there is nobody to see it."""
    in_notebook = _in_notebook()
    if not in_notebook and not (sys.stderr and sys.stderr.isatty()):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a notebook without ipywidgets it warns, and draws with characters
        from tqdm.auto import tqdm
    return tqdm(desc=what, unit=f" {unit}", total=total, leave=False, dynamic_ncols=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
