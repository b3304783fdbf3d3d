"""What is said while a job runs: a bar for people, a line now and then for log files, nothing for short jobs."""

import io
import sys
import types

from quire.progress import JobProgress, StartProgress


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_a_short_job_says_nothing_and_a_long_one_a_line_every_half_minute(capsys):
    clock = Clock()
    progress = JobProgress(100, clock=clock)
    progress.start()
    for clock.now in range(0, 71, 5):
        progress.update(int(clock.now), lambda: (1000 * int(clock.now), 500 * int(clock.now)))
    assert capsys.readouterr().err.splitlines() == [
        "quire: 30 of 100 sequences; 1,000 prompt and 500 generated tokens/s; 1 min 10 s left",
        "quire: 60 of 100 sequences; 1,000 prompt and 500 generated tokens/s; 40 s left",
    ]
    clock.now = 100
    progress.close(100)
    progress.close(100)
    assert capsys.readouterr().err == (
        "quire: 100 of 100 sequences; 1,000 prompt and 500 generated tokens/s; ended after 1 min 40 s\n"
    )
    for quiet, seconds in ((True, 70), (False, 29)):
        clock = Clock()
        progress = JobProgress(None, quiet=quiet, clock=clock)
        progress.start()
        clock.now = seconds
        progress.update(1, lambda: (1, 1))
        progress.close(1)
    assert capsys.readouterr().err == ""


def test_in_a_terminal_there_is_a_bar_while_it_runs(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = Clock()
    progress = JobProgress(100, clock=clock)
    assert sys.stderr.getvalue() == "", "not before it is asked for an output"
    progress.start()
    clock.now = 2.0
    progress.update(20, lambda: (3000, 400))
    seen = sys.stderr.getvalue()
    progress.close(20)
    assert "20/100" in seen
    assert "1,500 prompt and 200 generated tokens/s" in seen


def test_a_notebook_gets_a_bar_though_it_is_no_terminal(monkeypatch, capsys):
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    start = StartProgress("compiling", "program", quiet=False)
    start.update(3, 10, "a program")
    start.close()
    assert "3/10" in capsys.readouterr().err


def test_off_a_terminal_one_line_says_what_takes_so_long(capsys):
    for quiet in (False, True):
        start = StartProgress("compiling", "program", quiet=quiet)
        for done in range(11):
            start.update(done, 10)
        start.close()
    assert capsys.readouterr().err == "quire: compiling 10 programs ...\n"
