"""A server within a real memory limit: it states how far it can grow, is never killed, and refuses what cannot fit."""

import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.control_groups import ControlGroup, control_group
from tests.server.process import PYTHON, Server, serving

MIB = 1 << 20
ANSWER_S = 3600.0
"""Beyond what one request takes even where many other things run."""

pytestmark = [
    pytest.mark.own_server,
    pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's"),
]


def launcher(group: ControlGroup) -> list[str]:
    """Joins the group, and becomes the server."""
    join = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
    return ["sh", "-c", join, "sh", *PYTHON, "-m", "quire", "serve"]


def ask_all(server: Server, model: Path, num_prompts: int, prompt_len: int) -> None:
    """Random prompts at the same time, so that no two share a page. Every one is answered."""
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40_000) for _ in range(prompt_len)] for _ in range(num_prompts)]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S)

    def ask(prompt: list[int]) -> int:
        answer = client.completions.create(
            model=model.stem, prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    with client, ThreadPoolExecutor(num_prompts) as pool:
        assert list(pool.map(ask, prompts)) == [16] * num_prompts


def check_stayed_within(server: Server, group: ControlGroup, limit: int, at_ready: int, growth: float) -> None:
    assert server.process.poll() is None
    assert group.num_killed == 0
    assert group.peak_bytes < limit
    slack = 96 * MIB  # requests, responses, allocators
    assert server.memory <= at_ready + growth + slack, "more than was stated at the start"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "num_prompts", "prompt_len"),
    [
        pytest.param(1 << 30, 3, 1000, id="1GiB"),
        pytest.param(2 << 30, 12, 7000, id="2GiB", marks=pytest.mark.nightly),
    ],
)
def test_a_server_in_a_container_answers_and_is_not_killed(smollm2_gguf, limit, num_prompts, prompt_len):
    with (
        control_group("memory", limit) as group,
        serving(smollm2_gguf, launcher=launcher(group)) as server,
    ):
        started = "".join(server.lines)
        assert re.search(rf"are free of {limit >> 30}\.00 GiB \(limit in /sys/fs/cgroup/.*\)", started), started
        assert server.metric("quire_memory_limit_bytes") == limit
        at_ready, growth = server.memory, server.metric("quire_memory_growth_bytes")
        assert 0 < growth < server.metric("quire_memory_available_bytes") < limit
        ask_all(server, smollm2_gguf, num_prompts, prompt_len)
        check_stayed_within(server, group, limit, at_ready, growth)
        assert server.metric("quire_memory_growth_bytes") < growth, "pages that are in use are no growth any more"


def test_a_limit_smaller_than_the_model_is_named_with_the_fix(smollm2_gguf):
    """It ends before weights are read, and is not killed while they are."""
    limit = 384 * MIB
    with control_group("memory", limit) as group:
        server = Server(smollm2_gguf, launcher=launcher(group))
        try:
            assert server.process.wait(600) == 2
            server._reader.join()
            error = server.lines[-1]
            assert re.search(
                r"MODEL SmolLM2.* needs 0\.30 GiB for weights and 0\.38 GiB beside them, and 0\.\d\d GiB", error
            )
            assert f"are free of 0.38 GiB (limit in {group.folder}/memory." in error
            assert error.endswith("; raise that limit, or take a smaller model, or set quantize='gguf'\n")
            assert group.num_killed == 0
        finally:
            server.kill()
