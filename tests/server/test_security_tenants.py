"""T20: a stranger cannot tell by time, nor by what is told, whether somebody else's prompt is in the prefix cache."""

import contextlib
import http.client
import json
import random
import time

import numpy as np
import pytest

from tests.server.attack import KEY, OTHER_KEY
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = pytest.mark.own_server

NUM_PAIRS = 1000
NUM_CONTROL_PAIRS = 200
PROMPT_LEN = 256
CONTROL_LEN = 1024
"""Of the prompts that show that a cached one can be told from a new one at all: on a noisy machine, too."""
CONFIDENCE = 0.95


class Asker:
    """Measures, on one connection, how long a prompt takes to its first token."""

    def __init__(self, server, key: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}

    def seconds(self, prompt: list[int], **fields) -> tuple[float, int]:
        """And how many of its tokens were found in the cache."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields)
        begin = time.perf_counter()
        self.connection.request("POST", "/v1/completions", body, self.headers)
        response = self.connection.getresponse()
        answer = response.read()
        elapsed = time.perf_counter() - begin
        assert response.status == 200, answer
        return elapsed, json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]

    def close(self) -> None:
        self.connection.close()


@pytest.fixture(scope="module")
def shared(tiny_folder):
    with serving(tiny_folder, *SMALL, "--api-key", KEY, "--api-key", OTHER_KEY) as running:
        yield running


@pytest.fixture
def askers(shared):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Asker(shared, key))) for key in (KEY, OTHER_KEY)]


def measure(
    victim: Asker, stranger: Asker, num_pairs: int, seed: int, length: int = PROMPT_LEN
) -> tuple[np.ndarray, np.ndarray, int]:
    """Times of prompts that the victim has just asked and of new ones, in turn; and tokens the stranger found."""
    for asker in (victim, stranger):
        asker.close()  # the next request connects again: the server drops a connection that was idle for seconds
    rng = random.Random(seed)
    times: tuple[list[float], list[float]] = ([], [])
    num_found = 0
    for _ in range(num_pairs):
        prompts = [[rng.randrange(256) for _ in range(length)] for _ in range(2)]
        victim.seconds(prompts[0])
        for which in rng.sample((0, 1), 2):
            elapsed, found = stranger.seconds(prompts[which])
            times[which].append(elapsed)
            num_found += found
    return np.array(times[0]), np.array(times[1]), num_found


def auc(known: np.ndarray, new: np.ndarray) -> float:
    """How often a new prompt takes longer than one that the victim has asked; 0.5 tells nothing."""
    order = np.sort(known)
    below, up_to = np.searchsorted(order, new, "left"), np.searchsorted(order, new, "right")
    return float((below + up_to).mean() / (2 * len(known)))


def bounds(known: np.ndarray, new: np.ndarray, num_draws: int = 2000) -> tuple[float, float]:
    """Of the AUC, by drawing pairs again."""
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(known), (num_draws, len(known)))
    found = [auc(known[draw], new[draw]) for draw in draws]
    low, high = np.quantile(found, [1 - CONFIDENCE, CONFIDENCE])
    return float(low), float(high)


@pytest.mark.slow
@pytest.mark.alone
def test_time_tells_a_stranger_nothing_about_a_cached_prompt(askers):
    victim, stranger = askers
    measure(victim, stranger, 20, seed=0)  # until everything is warm
    known, new, _ = measure(victim, victim, NUM_CONTROL_PAIRS, seed=1, length=CONTROL_LEN)
    assert auc(known, new) > 0.9, "this machine is too noisy to see a cached prompt at all"
    known, new, num_found = measure(victim, stranger, NUM_PAIRS, seed=2)
    low, high = bounds(known, new)
    print(f"AUC {auc(known, new):.3f}, from {low:.3f} to {high:.3f}")
    assert high < 0.6
    assert low > 0.4
    assert num_found == 0


def test_a_stranger_finds_no_prefix_under_any_salt(askers):
    victim, stranger = askers
    prompt = list(range(PROMPT_LEN))
    assert victim.seconds(prompt)[1] == 0
    assert victim.seconds(prompt)[1] > 0
    assert victim.seconds(prompt, cache_salt="mine")[1] == 0
    assert victim.seconds(prompt, cache_salt="mine")[1] > 0
    assert stranger.seconds(prompt)[1] == 0
    assert stranger.seconds(prompt, cache_salt="mine")[1] == 0
    assert stranger.seconds(prompt)[1] > 0  # its own by now
