"""What a request costs the host: n sequences of one prompt share it, and do not each carry a copy."""

import tracemalloc

from quire import Request, SamplingParams
from quire.testing import fake_engine


def bytes_to_add(n: int, prompt_len: int) -> int:
    """Host memory that one request takes when it is added."""
    engine = fake_engine(max_model_len=1 << 16, num_pages=1 << 14, vocab_size=1 << 20)
    prompt = tuple(range(1000, 1000 + prompt_len))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        engine.add(Request(id="a", prompt_token_ids=prompt, params=SamplingParams(n=n, max_tokens=4)))
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_children_share_the_prompt_of_their_request():
    """64 prompts of 8,192 tokens with n=128 in one body would be gigabytes if each of them had its own."""
    short, long = bytes_to_add(128, 16), bytes_to_add(128, 16_384)
    assert long - short < 16_384 * 8 * 4, "the prompt costs a few copies, not 128"
    assert short / 128 < 4096, "a sequence that waits is small"


def test_a_fork_copies_what_was_generated_and_not_the_prompt():
    engine = fake_engine(eos_ids=(), max_model_len=1 << 14, num_pages=1 << 13, max_num_batched_tokens=1 << 14)
    prompt = tuple(i % 11 for i in range(8192))
    (parent,) = engine.add(Request(id="a", prompt_token_ids=prompt, params=SamplingParams(max_tokens=8)))
    engine.step()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        children = [engine.fork(parent) for _ in range(16)]
        spent = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert spent / 16 < 8192, "a copy of the prompt alone would be 64 KiB"
    assert all(child.tokens == parent.tokens for child in children)
