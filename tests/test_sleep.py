"""An engine that sleeps has no weights and no pages, and keeps its programs and its requests."""

import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from quire import LLM, Request, Rollouts, SamplingParams
from tests.server.tiny_folder import write_tiny_folder
from tests.tiny import tiny_llm

PROMPTS = [[(7 * i + j) % 90 + 1 for i in range(size)] for j, size in enumerate((3, 17, 40))]
PARAMS = SamplingParams(max_tokens=20, temperature=1, seed=3, ignore_eos=True, n=2)


def tokens(outputs) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def halved(params):
    return jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype), params)


def test_it_wakes_with_the_weights_it_is_given_and_compiles_nothing():
    with tiny_llm(debug=True, fail_on_compile=True) as llm:
        params, expected = llm.params, tokens(llm.generate(PROMPTS, PARAMS))
        llm.set_weights(halved(params), version="halved")
        other = tokens(llm.generate(PROMPTS, PARAMS))
        assert other != expected
        llm.sleep()
        llm.sleep()  # it does so already
        for use in (lambda: llm.params, lambda: llm.generate(PROMPTS), llm.engine.zero_cache, llm.engine.step):
            with pytest.raises(RuntimeError, match="the engine sleeps"):
                use()
        assert not llm.engine.has_work
        llm.wake(params, version="first")
        output = llm.generate(PROMPTS, PARAMS)
        assert tokens(output) == expected
        assert {version for answer in output for one in answer.outputs for version in one.weight_versions} == {"first"}
        assert [answer.num_cached_tokens for answer in output] == [0] * 3, "pages of before are not found"
        assert llm.engine.stats().held_pages == 0
        with pytest.raises(RuntimeError, match="is awake"):
            llm.wake(params)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_had_begun_goes_on_where_it_was(preemption):
    """Some of it runs and some was preempted, to host memory too."""
    params = SamplingParams(max_tokens=20, temperature=1, seed=3, ignore_eos=True, logprobs=0)
    with tiny_llm(num_pages=200) as llm:
        expected = [answer.outputs[0] for answer in llm.generate(PROMPTS, params)]
        weights = llm.params
    knobs = {"num_pages": 12, "max_model_len": 61, "max_num_seqs": 3, "max_rounds": 1, "debug": True}
    with tiny_llm(preemption=preemption, fail_on_compile=True, page_size=8, **knobs) as llm:
        engine = llm.engine
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), params=params) for i, prompt in enumerate(PROMPTS)
        ]
        sequences = [engine.add(request)[0] for request in requests]
        while not engine.stats().preemptions:
            engine.step()
        assert any(sequence.num_output for sequence in sequences)
        engine.sleep()
        late = engine.add(Request(id="late", prompt_token_ids=tuple(PROMPTS[0]), params=params))[0]
        engine.wake(weights)
        while engine.has_work:
            engine.step()
        for sequence, one in zip([*sequences, late], [*expected, expected[0]], strict=True):
            assert sequence.output_token_ids == one.token_ids
            np.testing.assert_allclose(
                [e.logprob for e in sequence.logprobs], [e.logprob for e in one.logprobs], atol=1e-4
            )


def test_weights_that_are_refused_leave_it_asleep():
    with tiny_llm() as llm:
        params, expected = llm.params, tokens(llm.generate(PROMPTS, PARAMS))
        llm.sleep()
        wrong = {**params, "embed": params["embed"][:-1]}
        with pytest.raises(ValueError, match="embed"):
            llm.wake(wrong)
        with pytest.raises(ValueError, match="came from no file"):
            llm.wake()
        assert llm.engine.is_asleep
        llm.wake(params)
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_it_reads_its_file_again(tmp_path):
    with LLM(write_tiny_folder(tmp_path / "tiny"), num_pages=64, max_num_seqs=4, quiet=True) as llm:
        expected = tokens(llm.generate(PROMPTS, PARAMS))
        llm.set_weights(halved(llm.params))
        llm.sleep()
        llm.wake()
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_one_that_sleeps_can_be_closed():
    llm = tiny_llm()
    llm.sleep()
    llm.close()


def test_rollouts_wait_while_the_engine_sleeps():
    with Rollouts.from_factory(lambda: tiny_llm(num_pages=200)) as rollouts:
        weights = rollouts.call(lambda engine: engine.params)
        expected = tokens([rollouts.submit(prompt, PARAMS).result() for prompt in PROMPTS])
        running = [rollouts.submit(prompt, PARAMS) for prompt in PROMPTS]
        rollouts.sleep()
        waiting = [rollouts.submit(prompt, PARAMS) for prompt in PROMPTS]
        steps = rollouts.call(lambda engine: engine.progress.steps)
        assert rollouts.call(lambda engine: engine.progress.steps) == steps
        assert not any(future.done() for future in waiting)
        rollouts.wake(weights, version="again")
        assert tokens([future.result() for future in running]) == expected
        outputs = [future.result() for future in waiting]
        assert tokens(outputs) == expected
        assert [one.weight_versions for output in outputs for one in output.outputs] == [["again"] * 20] * 6


MEMORY = """
import jax, os, sys
from quire import LLM, SamplingParams

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

with LLM(sys.argv[1], num_pages=4096, max_num_seqs=4, max_num_batched_tokens=64, quiet=True) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), progress=False)
    runner = llm.engine.runner
    llm.engine.zero_cache()  # every page has its memory
    given = sum(array.nbytes for array in jax.tree.leaves((runner.params, runner._caches)))
    awake = resident_bytes()
    llm.sleep()
    asleep = resident_bytes()
    llm.wake()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), progress=False)
    llm.engine.zero_cache()
    print(f"{given / 2**20:.0f} MiB of weights and pages, {(awake - asleep) / 2**20:.0f} MiB less when asleep, "
          f"{(resident_bytes() - awake) / 2**20:.0f} MiB more when awake again")
    assert awake - asleep >= 0.9 * given
    assert resident_bytes() - awake < 0.1 * given
"""


@pytest.mark.slow
def test_its_memory_goes_back_to_the_system(smollm2_gguf):
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(smollm2_gguf)]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    print(out.stdout)
    assert out.returncode == 0, out.stderr + out.stdout
