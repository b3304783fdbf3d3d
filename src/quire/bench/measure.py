"""Measurements of speed, with their noise: warm-up apart, sides interleaved, medians and spread.

Machines are noisy: compare only within one run. Each measurement yields results, plain dicts that print as one line of
JSON. What a number is measured against runs beside us in the same minute: the bare loop in this process, or a peer in
its own (see `Peer`).
"""

import asyncio
import csv
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench import http_client
from quire.bench.bare_loop import BareLoop
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence as TokenSequence
from quire.engine.drafting_runner import DraftingRunner
from quire.llm import LLM

Result = dict[str, Any]
Prompts = list[list[int]]
Side = Callable[[Prompts], float]
"""Does the work and says how many seconds it took."""


class Peer:
    """Another engine, in a process of its own, that speaks lines of JSON.

    It prints `{"ready": true, "seconds": s}` once it is ready. A line `{"prompts": [[id]], "new_tokens": n}` asks it to
    continue every prompt greedily by exactly n tokens, all at once; it answers `{"seconds": s}`.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds_to_ready: float = self._answer()["seconds"]

    def generate(self, prompts: Prompts, new_tokens: int) -> float:
        """Seconds to continue every prompt."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the peer has no input")
        stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> Result:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                return json.loads(line)
        self.close()
        raise ValueError(f"the peer ended with exit code {self._process.returncode}: {self._command}")

    def close(self) -> None:
        """End it; a peer leaves when its input ends."""
        with self._process:
            pass

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def throughput(
    llm: LLM,
    *,
    rows: Sequence[int],
    prompt_len: int,
    new_tokens: int,
    repeats: int,
    against: str | None = None,
    **draw: Any,
) -> Iterator[Result]:
    """Generated tokens a second of a fixed batch, prompts included. `draw` are SamplingParams other than greedy."""
    params = replace(SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True), **draw)
    for num, ours, theirs in _compared(llm, params, rows, prompt_len, repeats, against):
        yield {"kind": "throughput", "rows": num} | _speeds(num * new_tokens, ours, theirs, against)


def prefill(
    llm: LLM, *, rows: Sequence[int], prompt_len: int, repeats: int, against: str | None = None
) -> Iterator[Result]:
    """Prompt tokens a second: prompts that share nothing, one token drawn from each."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for num, ours, theirs in _compared(llm, params, rows, prompt_len, repeats, against):
        result = {"kind": "prefill", "rows": num, "prompt_len": prompt_len}
        yield result | _speeds(num * prompt_len, ours, theirs, against)


def latency(llm: LLM, *, contexts: Sequence[int], new_tokens: int, repeats: int) -> Iterator[Result]:
    """One stream at each length of context: time to the first token, and between tokens (those that come together
    share the time of their group). Contexts are interleaved: they are compared with each other.
    """
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    first: dict[int, list[float]] = {context: [] for context in contexts}
    between: dict[int, list[float]] = {context: [] for context in contexts}
    for i in range(repeats + 1):
        for context in contexts:
            (prompt,) = random_prompts(rng, llm, 1, context)
            times = [time.perf_counter()]
            for chunk in llm.stream(prompt, params):
                times += [time.perf_counter()] * len(chunk.token_ids)
            if i:
                first[context].append(times[1] - times[0])
                between[context].append((times[-1] - times[1]) / (len(times) - 2))
    for context in contexts:
        result: Result = {"kind": "latency", "context": context}
        yield result | _median("first_token_s", first[context]) | _median("inter_token_s", between[context])


def fork(llm: LLM, *, rows: Sequence[int], prompt_len: int, new_tokens: int, repeats: int) -> Iterator[Result]:
    """Many samples of one prompt, against one prefill and as many single requests that find it in the prefix cache."""
    one = SamplingParams(seed=1, max_tokens=new_tokens, ignore_eos=True)
    computes_prompt = SamplingParams(temperature=0, max_tokens=1)
    rng = np.random.default_rng(0)
    for num in rows:
        many = replace(one, n=num)
        ours, theirs = [], []
        for i in range(repeats + 1):
            (prompt,) = random_prompts(rng, llm, 1, prompt_len)
            seconds = [_seconds(lambda prompt=prompt, many=many: _generate(llm, [prompt], many))]
            llm.engine.clear_prefix_cache()
            seconds.append(_seconds(lambda prompt=prompt: _generate(llm, [prompt], computes_prompt)))
            seconds[1] += _seconds(lambda prompt=prompt, num=num: _generate(llm, [prompt] * num, one))
            llm.engine.clear_prefix_cache()
            if i:
                ours.append(seconds[0])
                theirs.append(seconds[1])
        yield {"kind": "fork", "rows": num} | _speeds(num * new_tokens, ours, theirs, "cached singles")


def prefix(llm: LLM, *, prompt_len: int, repeats: int) -> Iterator[Result]:
    """Time to the first token of a prompt of which all but the last page is known, against one that is new."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    rng = np.random.default_rng(0)
    tail = llm.engine.config.page_size
    ours, theirs = [], []
    for i in range(repeats + 1):
        (shared,) = random_prompts(rng, llm, 1, prompt_len - tail)
        new, known = (shared + ending for ending in random_prompts(rng, llm, 2, tail))
        seconds = [_seconds(lambda prompt=prompt: _generate(llm, [prompt], params)) for prompt in (new, known)]
        if i:
            theirs.append(seconds[0])
            ours.append(seconds[1])
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    result: Result = {"kind": "prefix", "prompt_len": prompt_len}
    yield result | _median("hit_s", ours) | _median("miss_s", theirs) | _median("ratio", ratios)


def host(llm: LLM, *, rows: Sequence[int], prompt_len: int, new_tokens: int, repeats: int) -> Iterator[Result]:
    """Where the time of a fixed batch goes: what the host adds to a generated token, and its share of the device's."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    rng = np.random.default_rng(0)
    for num in rows:
        shares, micros = [], []
        for i in range(repeats + 1):
            before = llm.engine.stats().timing
            _generate(llm, random_prompts(rng, llm, num, prompt_len), params)
            spent = llm.engine.stats().timing - before
            if i:
                shares.append(spent.host_s / spent.wait_s)
                micros.append(spent.host_s / (num * new_tokens) * 1e6)
        yield {"kind": "host", "rows": num} | _median("host_us_per_token", micros) | _median("ratio", shares)


def serve(llm: LLM, *, trace: Path, requests: int, scale: float, rate: float, seed: int = 0) -> Iterator[Result]:
    """Requests that arrive when a trace says, and do not wait for each other.

    Lengths are the trace's times `scale`; times are stretched so that `rate` requests arrive in a second.
    """
    arrivals = read_trace(trace, requests, scale, rate, llm.engine.max_model_len)
    rng = np.random.default_rng(seed)
    _generate(llm, random_prompts(rng, llm, 4, 32), SamplingParams(temperature=0, max_tokens=8))  # warm-up
    engine, pending = llm.engine, list(reversed(arrivals))
    seen: dict[TokenSequence, list[float]] = {}
    arrived: dict[TokenSequence, float] = {}
    start = time.perf_counter()
    while pending or engine.has_work:
        now = time.perf_counter() - start
        while pending and pending[-1][0] <= now:
            at, prompt_len, new_tokens = pending.pop()
            (prompt,) = random_prompts(rng, llm, 1, prompt_len)
            params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
            request = Request(id=str(len(pending)), prompt_token_ids=tuple(prompt), params=params)
            (sequence,) = engine.add(request)
            arrived[sequence], seen[sequence] = at, []
        if not engine.has_work:
            time.sleep(max(pending[-1][0] - now, 0.0))
            continue
        events = engine.step()
        now = time.perf_counter() - start
        for event in events:
            seen[event.sequence] += [now] * len(event.token_ids)
    took = time.perf_counter() - start
    first = [times[0] - arrived[sequence] for sequence, times in seen.items()]
    between = [(times[-1] - times[0]) / (len(times) - 1) for times in seen.values() if len(times) > 1]
    tokens = sum(map(len, seen.values()))
    result: Result = {"kind": "serve", "requests": requests, "scale": scale, "rate": rate, "seconds": took}
    result |= {"tokens_per_s": tokens / took, "prompt_tokens_per_s": sum(a[1] for a in arrivals) / took}
    yield result | _quantiles("first_token_s", first) | _quantiles("inter_token_s", between)


def serve_url(
    url: str,
    *,
    key: str | None,
    rows: Sequence[int],
    prompt_len: int,
    new_tokens: int,
    requests: int,
    trace: Path | None,
    scale: float,
    rate: float,
) -> Iterator[Result]:
    """Measure a server: so many streams at once, or when a trace says. The client's own time is told."""
    model = asyncio.run(http_client.get(url, "/models", key))["data"][0]
    rng = np.random.default_rng()  # the server may know the prompts of an earlier run

    def body(prompt_len: int, new_tokens: int) -> dict[str, Any]:
        vocab_size = model.get("vocab_size", 1000)
        prompt = rng.integers(vocab_size // 100, vocab_size, size=prompt_len).tolist()
        return {"model": model["id"], "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}

    if trace is not None:
        arrivals = read_trace(trace, requests, scale, rate, model.get("max_model_len", 2048))
        bodies = [(at, body(*lengths)) for at, *lengths in arrivals]
        result: Result = {"kind": "serve", "requests": requests, "scale": scale, "rate": rate}
        yield result | _replies(lambda: http_client.at_times(url, bodies, key))
        return
    for num in rows:
        asked = [body(prompt_len, new_tokens) for _ in range(max(requests, num))]
        yield {"kind": "serve", "rows": num, "requests": len(asked)} | _replies(
            lambda asked=asked, num=num: http_client.at_once(url, asked, num, key)
        )


def _replies(run: Callable[[], Coroutine[Any, Any, list[http_client.Reply]]]) -> Result:
    cpu, start = time.process_time(), time.perf_counter()
    replies = asyncio.run(run())
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    good = [reply for reply in replies if reply.is_complete and reply.times]
    if not good:
        raise ValueError(f"no request was answered; the first said {replies[0].status}: {replies[0].error}")
    between = [reply.seconds_per_token for reply in good if reply.seconds_per_token is not None]
    result: Result = {"seconds": took, "answered": len(good), "refused": sum(r.status == 429 for r in replies)}
    result |= {"tokens_per_s": sum(reply.num_tokens for reply in good) / took, "client_cpu_s": cpu}
    result |= _quantiles("first_token_s", [reply.seconds_to_first for reply in good])
    return result | (_quantiles("inter_token_s", between) if between else {})


def read_trace(
    trace: Path, requests: int, scale: float, rate: float, max_model_len: int
) -> list[tuple[float, int, int]]:
    """(seconds, prompt tokens, new tokens) of the first requests of a trace, scaled."""
    with open(trace, newline="") as file:
        rows = [row for _, row in zip(range(requests), csv.DictReader(file), strict=False)]
    if len(rows) < requests:
        raise ValueError(f"--requests {requests}: {trace.name} has {len(rows)}")
    times = [float(row["arrived_at"]) for row in rows]
    stretch = requests / rate / (times[-1] - times[0])
    arrivals = []
    for at, row in zip(times, rows, strict=True):
        lengths = [max(round(int(row[f"num_{what}_tokens"]) * scale), 1) for what in ("prefill", "decode")]
        new_tokens = min(lengths[1], max_model_len // 2)
        arrivals.append(((at - times[0]) * stretch, min(lengths[0], max_model_len - new_tokens), new_tokens))
    return arrivals


def _compared(
    llm: LLM, params: SamplingParams, rows: Sequence[int], prompt_len: int, repeats: int, against: str | None
) -> Iterator[tuple[int, list[float], list[float]]]:
    """For each number of rows the seconds of both sides; of ours alone when there is no other."""
    new_tokens = params.max_tokens or 0
    with nullcontext() if against in (None, "bare") else Peer(against) as peer:
        for num in rows:
            other = peer and (lambda prompts: peer.generate(prompts, new_tokens))
            if against == "bare":
                other = bare_side(llm, num, prompt_len, new_tokens)
            sides = {"ours": our_side(llm, params)} | ({"theirs": other} if other else {})
            seconds = take_turns(sides, llm, num, prompt_len, repeats)
            yield num, seconds["ours"], seconds.get("theirs", [])


def our_side(llm: LLM, params: SamplingParams) -> Side:
    """Our engine, over a batch of prompts that it does not know."""

    def side(prompts: Prompts) -> float:
        llm.engine.clear_prefix_cache()
        return _seconds(lambda: _generate(llm, prompts, params))

    return side


def bare_side(llm: LLM, rows: int, prompt_len: int, new_tokens: int) -> Side:
    """The bare loop over the engine's own weights."""
    runner = llm.engine.runner
    runner = runner.target if isinstance(runner, DraftingRunner) else runner
    return loop_side(BareLoop(runner, rows=rows, prompt_len=prompt_len, new_tokens=new_tokens))  # pyright: ignore


def loop_side(loop: BareLoop) -> Side:
    """Any bare loop."""
    return lambda prompts: _seconds(lambda: loop.generate(np.array(prompts, np.int32)))


def _generate(llm: LLM, prompts: Prompts, params: SamplingParams) -> object:
    return llm.generate(prompts, params, progress=False)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def random_prompts(rng: np.random.Generator, llm: LLM, rows: int, length: int) -> Prompts:
    """Prompts of random tokens, but for the special ones at the vocabulary's beginning."""
    vocab_size = llm.engine.model.vocab_size
    return rng.integers(vocab_size // 100, vocab_size, size=(rows, length)).tolist()


def take_turns(sides: Mapping[str, Side], llm: LLM, rows: int, prompt_len: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side on the same prompts, alternating who goes first; the first time is warm-up and dropped."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        prompts = random_prompts(rng, llm, rows, prompt_len)
        for name in list(sides) if i % 2 else reversed(list(sides)):
            took = sides[name](prompts)
            if i:
                seconds[name].append(took)
    return seconds


def _speeds(tokens: int, ours: list[float], theirs: list[float], against: str | None) -> Result:
    """Tokens a second, and the ratio to the other side: of the medians, with the spread of the pairs."""
    result = _median("tokens_per_s", [tokens / s for s in ours])
    if theirs:
        speed = statistics.median(tokens / s for s in theirs)
        result |= {"against": against, "against_tokens_per_s": speed}
        result |= _median("ratio", [b / a for a, b in zip(ours, theirs, strict=True)])
        result["ratio"] = result["tokens_per_s"] / speed
    return result


def _median(name: str, values: Sequence[float]) -> Result:
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _quantiles(name: str, values: Sequence[float]) -> Result:
    p50, p95 = np.quantile(values, [0.5, 0.95]).tolist()
    return {f"{name}_p50": p50, f"{name}_p95": p95}
