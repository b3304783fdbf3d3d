"""Quire as the sampler of Tunix's learners: `QuireRollout`, for `ClusterConfig(rollout_engine=...)`.

    engine = functools.partial(QuireRollout, model_config=ModelConfig.from_folder(folder), max_num_seqs=64)
    cluster = RLCluster(actor=model, tokenizer=tokenizer, cluster_config=ClusterConfig(rollout_engine=engine, ...))

Imports Tunix (`pip install google-tunix`), which nothing else of Quire does.
"""

# pyright: reportMissingImports=false

import itertools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import EngineKnobs, ModelConfig
from quire.core.sampling_params import SamplingParams
from quire.device.mesh import make_mesh
from quire.outputs import CompletionOutput
from quire.rollouts.rollouts import Rollouts
from quire.train import logprobs
from quire.weights import from_tunix

try:
    from flax import nnx
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
except ModuleNotFoundError as error:
    if error.name not in ("flax", "tunix"):
        raise
    raise ModuleNotFoundError(f"{__name__} needs Tunix: pip install google-tunix", name=error.name) from None


class QuireRollout(BaseRollout):
    """Samples and scores for a Tunix learner on a paged KV cache, in the learner's own program.

    Its methods are for any thread. Equal prompts of a call, as a group of GRPO is, are computed once. Token ids and
    text are those of Tunix's tokenizer; the end token is part of an output. Log-probabilities are those of what was
    drawn from (temperature and cuts applied), as Tunix's trainer computes its own.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh,
        rollout_config: RolloutConfig,
        *,
        model_config: ModelConfig,
        lora_alpha: float | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """The first four are Tunix's; give the others by `functools.partial`.

        `model_config` is the model's (`ModelConfig.from_folder`), `lora_alpha` what LoRA factors are multiplied by over
        their rank, `knobs` those of `LLM`. By default weights have the type of `rollout_config.data_type`, bfloat16
        without one, and a sequence may have `rollout_config.kv_cache_size` tokens, or a prompt and an output of full
        length where that is more. The model is split over all devices of `mesh`.
        """
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._config, self._model_config, self._lora_alpha = rollout_config, model_config, lora_alpha
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        asked = rollout_config.data_type
        defaults: EngineKnobs = {
            "dtype": "bfloat16" if asked is None else np.dtype(asked).name,
            "max_model_len": max(longest, min(rollout_config.kv_cache_size, model_config.max_len)),
        }
        knobs = defaults | knobs
        self._dtype = knobs["dtype"]
        self._mesh = make_mesh(mesh.devices.ravel().tolist())
        self._adapted = rollout_actor if jax.tree.leaves(nnx.state(rollout_actor, nnx.LoRAParam)) else None
        """The model that LoRA factors belong to: with them, only these are sent."""
        params = self._mapped(nnx.state(rollout_actor, nnx.Param))
        self.rollouts = Rollouts.from_params(model_config, params, mesh=self._mesh, quiet=True, **knobs)
        self._num_calls = itertools.count()

    def close(self) -> None:
        """End what runs, and give weights and pages back."""
        self.rollouts.close()

    def _mapped(self, state: Any) -> Any:
        return from_tunix(state, self._model_config, dtype=self._dtype, mesh=self._mesh, lora_alpha=self._lora_alpha)

    def generate(self, prompts: list[str] | str, rollout_config: RolloutConfig, **_: Any) -> RolloutOutput:
        """Continue prompts, one output for each; the agentic learner gives a text without a list around it."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._encoded(prompt) for prompt in prompts]
        answers = self.rollouts.submit(ids, self._params_of(ids, rollout_config)).result()
        outputs: list[CompletionOutput] = [answer.outputs[0] for answer in answers]
        width = max(rollout_config.max_prompt_length, *map(len, ids))
        padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        scores = None
        if rollout_config.return_logprobs:
            scores = [np.array([one.processed_logprob for one in each.logprobs or ()], np.float32) for each in outputs]
        return RolloutOutput(
            text=[self._tokenizer.decode(each.token_ids) for each in outputs],
            logits=None,  # pyright: ignore - other samplers of Tunix that keep none do the same
            tokens=[np.array(each.token_ids, np.int32) for each in outputs],
            left_padded_prompt_tokens=padded,
            logprobs=scores,
        )

    def _encoded(self, text: str) -> list[int]:
        """As Tunix's own sampler does."""
        begin = self._tokenizer.bos_id()
        ids = ([begin] if begin else []) + list(self._tokenizer.encode(text))
        return [int(token) for token in self._tokenizer.dedup_bos_ids(ids)]

    def _params_of(self, prompts: list[list[int]], config: RolloutConfig) -> list[SamplingParams]:
        """One for each prompt, the same for equal ones, so that they become one request of several samples.

        Tunix gives every call the same seed: that of a request depends on the call and on the prompt's place, too.
        """
        seed, call = _numbers(config.seed), next(self._num_calls)
        places: dict[tuple[int, ...], int] = {}

        def params(place: int) -> SamplingParams:
            drawn = np.random.SeedSequence([*seed, call, place]).generate_state(1, np.uint64) if seed else None
            return SamplingParams(
                temperature=config.temperature,
                top_p=1.0 if config.top_p is None else config.top_p,
                top_k=max(config.top_k or 0, 0),
                max_tokens=config.max_tokens_to_generate,
                ignore_eos=True,  # Tunix says which tokens end
                stop_token_ids=tuple(config.eos_tokens or [self.eos_id()]),
                logprobs=0 if config.return_logprobs else None,
                seed=None if drawn is None else int(drawn[0]),
            )

        return [params(places.setdefault(tuple(prompt), i)) for i, prompt in enumerate(prompts)]

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """The log-probability of each completion token, `[B, completion length]`, 0 after a row's end token.

        Under the temperature of the `rollout_config` that this was made with, as Tunix's trainer has it. It is computed
        on one device, which must hold the model.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        ends = completions == self.eos_id()
        is_token = np.concatenate(
            [np.cumsum(prompts != self.pad_id(), axis=1) > 0, np.cumsum(ends, axis=1) - ends == 0], axis=1
        )
        params = self.rollouts.call(lambda engine: engine.params)
        return logprobs(
            jax.device_put(params, self._mesh.devices.flat[0]),
            jnp.asarray(np.concatenate([prompts, completions], axis=1)),
            self._model_config,
            start=prompts.shape[1],
            mask=jnp.asarray(is_token),
            temperature=self._config.temperature or 1.0,
            dtype=self._dtype,
        )

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Compute with other weights from the next step on: all of them, or the LoRA factors of a model that has some.

        What runs goes on, and its tokens carry the version they were drawn under.
        """
        if self._adapted is not None:
            params = nnx.merge_state(nnx.state(self._adapted, nnx.Param), params)
        self.rollouts.set_weights(self._mapped(params), copy=False)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """None: the engine's weights are its own, and Tunix sends them after every update."""


def _numbers(seed: Any) -> list[int]:
    """The numbers of a seed, or of a key of `jax.random`; none without one."""
    if seed is None:
        return []
    if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [int(number) & 0xFFFFFFFF for number in np.asarray(seed).ravel()]
