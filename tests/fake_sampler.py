"""A sampler for the device without a model: a token depends on every sampling parameter, as a real one's does.

What a token is drawn from is a hash of the state of its row and of all that should influence it; for penalties also the
tokens that its row has in its pages. Log-probabilities are made from the same hashes, so that one which belongs to
another token, sequence or round has another value.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from quire.config import DEFAULT_MAX_LOGPROBS
from quire.core.sampling_params import DRAWS, PENALTIES, SamplingParams
from quire.device.inputs import INVALID, SampleInputs, StepInputs, StepOutput, default_samples
from quire.testing import FakeRunner

defaults = cache(default_samples)
GREEDY = SamplingParams(temperature=0)


def drawn_from(state: int, params: SamplingParams, tokens: list[int], prompt_len: int, stop_ids: set[int]) -> int:
    """The state that the token after `tokens` is drawn from, by what its request asked for.

    A bias has no influence on one of `stop_ids` while `min_tokens` forbids it.
    """
    forbidden = stop_ids if len(tokens) - prompt_len < params.min_tokens else set()
    biases = tuple((token, bias) for token, bias in sorted(params.logit_bias.items()) if token not in forbidden)
    draws = [getattr(params if params.temperature else GREEDY, name) for name in DRAWS]
    penalties = [getattr(params, name) for name in PENALTIES]
    seen = (*tokens, prompt_len) if penalties != [getattr(GREEDY, name) for name in PENALTIES] else ()
    return hash((state, *draws, *penalties, seen, biases))


def logprob(state: int, token: int) -> float:
    """A log-probability that float32 holds exactly."""
    return -(hash((state, token)) % 4096) / 64


def kept_mass(state: int) -> float:
    """A probability that float32 holds exactly."""
    return hash((state, 1, 1)) % 4096 / 4096


def top(state: int, count: int = DEFAULT_MAX_LOGPROBS) -> list[tuple[int, float]]:
    """The likeliest tokens and their log-probabilities."""
    first = hash((state,)) % 64
    return [(first + i, -i / 4) for i in range(count)]


class SamplingRunner(FakeRunner):
    """Draws by `drawn_from`, from nothing but the arrays of a step and the tokens in its pages."""

    def _rounds(self, inputs: StepInputs) -> StepOutput:
        self._page_ids = inputs.page_ids
        output = super()._rounds(inputs)
        del self._page_ids
        return output

    def _score(self, states: list[int], scores: SampleInputs) -> StepOutput:
        raw = [states[i] for i in scores.packed_index_S.tolist()]
        absent = defaults(len(raw), self.vocab_size)
        draws = absent if scores.temperature_S is None else scores
        columns = [getattr(draws, f"{name}_S").tolist() for name in DRAWS]
        no_penalties = [getattr(GREEDY, name) for name in PENALTIES]
        mixed = [hash((state, *values, *no_penalties, (), ())) for state, *values in zip(raw, *columns, strict=True)]
        return self._with_logprobs(super()._score(states, scores), raw, mixed, scores)

    def _draw(self, states: list[int], samples: SampleInputs) -> StepOutput:
        raw = [states[i] for i in samples.packed_index_S.tolist()]
        fields = [f"{name}_S" for name in (*DRAWS, *PENALTIES)]
        no_penalties = [getattr(GREEDY, name) for name in PENALTIES]
        absent = defaults(len(raw), self.vocab_size)
        columns = [getattr(absent if getattr(samples, name) is None else samples, name).tolist() for name in fields]
        mixed = []
        for i, (state, *values) in enumerate(zip(raw, *columns, strict=True)):
            seen = () if values[len(DRAWS) :] == no_penalties else self._seen(samples, i)
            biases: list[tuple[int, float]] = []
            if samples.bias_SE is not None:
                is_bias = (samples.bias_ids_SE[i] != INVALID) & np.isfinite(samples.bias_SE[i])
                both = samples.bias_ids_SE[i][is_bias].tolist(), samples.bias_SE[i][is_bias].tolist()
                biases = sorted(zip(*both, strict=True))
            mixed.append(hash((state, *values, seen, tuple(biases))))
        drawn = super()._draw(mixed, replace(samples, packed_index_S=np.arange(len(raw))))
        return self._with_logprobs(drawn, raw, mixed, samples)

    def _seen(self, samples: SampleInputs, i: int) -> tuple[int, ...]:
        """The tokens in the pages of a sample's row before the position it draws, and where its output begins."""
        table, size = self._page_ids.of(int(samples.row_S[i])).tolist(), self.page_size
        end = min(samples.position_S[i], len(table) * size)  # a row that has ended may be asked beyond its table
        places = [self._pages[table[p // size]][p % size] for p in range(end)]
        return (*(-1 if place is None else place[0] for place in places), int(samples.prompt_len_S[i]))

    def _with_logprobs(self, drawn: StepOutput, raw: list[int], mixed: list[int], samples: SampleInputs) -> StepOutput:
        if samples.want_logprobs_S is None:
            return drawn
        tokens = drawn.tokens_SR[:, 0].tolist()
        changes = {"kept_mass_SR": np.array([[kept_mass(state)] for state in mixed], np.float32)}
        for prefix, states in (("", raw), ("processed_", mixed)):
            values = [[logprob(state, token)] for state, token in zip(states, tokens, strict=True)]
            changes[f"{prefix}logprobs_SR"] = np.array(values, np.float32)
            if samples.want_top_S is not None:
                tops = np.array([[top(state, self.max_logprobs)] for state in states])
                changes[f"{prefix}top_ids_SRX"] = tops[..., 0].astype(np.int32)
                changes[f"{prefix}top_logprobs_SRX"] = tops[..., 1].astype(np.float32)
        return replace(drawn, **changes)
