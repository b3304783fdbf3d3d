"""A process that was forked from the one with an LLM: its threads are not there, and no call waits for them."""

import subprocess
import sys
import textwrap

import pytest

USES = {
    "LLM": "llm.generate([[1, 2, 3]], progress=False)",
    "LLM.stream": "list(llm.stream([1, 2, 3]))",
    "Engine": "engine.step()",
    "AsyncLLM": "asyncio.run(served.generate([1, 2, 3]))",
    "AsyncLLM.call": "asyncio.run(served.call(print))",
    "Rollouts": "rollouts.submit([[1, 2, 3]]).result()",
    "Rollouts.collect": "rollouts.collect(1, timeout_s=60)",
    "Rollouts, async for": "asyncio.run(anext(aiter(rollouts)))",
    "Rollouts.set_weights": "rollouts.set_weights(None)",
}
PROGRAM = """
    import asyncio, multiprocessing, sys, warnings

    from quire import AsyncLLM
    from quire.rollouts import Rollouts
    from tests.fake_llm import fake_llm

    warnings.simplefilter("ignore")  # Python and JAX warn of any fork; most programs do not see that

    async def opened():
        llm = AsyncLLM.from_factory(fake_llm)
        await llm.start()
        return llm

    llm, served, rollouts = fake_llm(), asyncio.run(opened()), Rollouts.from_factory(fake_llm)
    engine = llm.engine

    def use(number):
        try:
            eval(sys.argv[1 + number])
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        else:
            print("nothing was raised", flush=True)

    for number in range(len(sys.argv) - 1):
        child = multiprocessing.get_context("fork").Process(target=use, args=(number,))
        child.start()
        child.join(60)
        if child.is_alive():
            print("it hangs", flush=True)
            child.kill()
    assert llm.generate([[1, 2, 3]], progress=False)
    rollouts.close()
    asyncio.run(served.close())
"""


@pytest.mark.slow
def test_a_forked_child_is_told_to_use_spawn():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *USES.values()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(USES)
    for name, line in zip(USES, lines, strict=True):
        assert line.startswith("RuntimeError this process was forked from the one that made the LLM"), name
        assert "get_context('spawn')" in line
