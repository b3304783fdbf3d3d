"""Runs in the environment of .ci/tunix-env: Tunix's GRPO learner, unchanged, with Quire as its sampler.

Prints one JSON object: of each run how far Quire's log-probabilities were from those of Tunix's model at most, and what
the engine had computed.
"""

import functools
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig as AgenticGRPOConfig
from tunix.rl.agentic.agentic_grpo_learner import GRPOLearner as AgenticGRPOLearner
from tunix.rl.agentic.parser.chat_template_parser.parser import BaseChatTemplateParser, TokenConfig
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from quire.integrations.tunix import QuireRollout
from tests.tiny import VOCAB, tiny_config
from tests.tunix.logprobs import LORA, ROTARY, SHAPE, randomise

PAD, BOS, EOS = 0, 1, 2
GROUP, PROMPT_LEN, OUTPUT_LEN, NUM_STEPS = 8, 24, 10, 10
MODEL = tiny_config("qwen3", rotary=ROTARY, norm_eps=1e-6)
KNOBS = {"matmul": "xla", "attention": "xla", "max_num_seqs": 16, "max_num_batched_tokens": 64, "page_size": 4}


class Numbers:
    """A tokenizer whose text is the ids, whatever stands between them: the agentic learner's prompts have brackets."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)]

    def decode(self, ids: list[int], **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


class PlainParser(BaseChatTemplateParser):
    """A conversation is what was said, with spaces between."""

    def _init_tokens(self) -> TokenConfig:
        return TokenConfig(message_separator=" ")

    def _init_generation_prompt(self) -> str:
        return " "


class WatchedRollout(QuireRollout):
    """Notes how far each of its log-probabilities is from that of the model that is trained."""

    def __init__(self, rollout_actor, *args, **kwargs):
        super().__init__(rollout_actor, *args, **kwargs)
        self.trained, self.differences, self.outputs = rollout_actor, [], set()

    def _tunix(self, prompts, completions):
        graph, state = nnx.split(self.trained)
        return np.asarray(
            common.compute_per_token_logps(
                graph, state, jnp.asarray(prompts), jnp.asarray(completions), PAD, EOS, temperature=0.9
            )
        )

    def generate(self, prompts, rollout_config, **kwargs):
        output = super().generate(prompts, rollout_config, **kwargs)
        padded = np.full((len(output.tokens), OUTPUT_LEN), PAD, np.int32)
        for row, tokens in zip(padded, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        expected = self._tunix(output.left_padded_prompt_tokens, padded)
        for tokens, got, wanted in zip(output.tokens, output.logprobs, expected, strict=True):
            if PAD not in tokens:  # to Tunix, one that was drawn is padding
                self.differences.append(float(np.abs(got - wanted[: len(got)]).max()))
        self.outputs.add(tuple(map(tuple, output.tokens)))
        return output

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        got = super().get_per_token_logps(prompt_tokens, completion_tokens)
        expected = self._tunix(prompt_tokens, completion_tokens)
        is_scored = np.cumprod(np.asarray(completion_tokens) != PAD, axis=1, dtype=bool)
        self.differences.append(float(np.abs(np.where(is_scored, np.asarray(got) - expected, 0)).max()))
        return got


def qwen(*, with_lora: bool = False) -> nnx.Module:
    shape = qwen3.ModelConfig(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SHAPE)
    model = qwen3.Qwen3(shape, rngs=nnx.Rngs(0))
    if with_lora:
        provider = qwix.LoraProvider(module_path=".*(q|v|o|gate|down)_proj", **LORA)
        model = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())
    return randomise(model)


def mostly_even(prompts, completions, **_) -> list[float]:
    rows = [[int(word) for word in text.split()] for text in completions]
    return [sum(token % 2 == 0 for token in row) / max(len(row), 1) for row in rows]


def learn(*, with_lora: bool = False, num_iterations: int = 1, is_agentic: bool = False) -> dict:
    actor, reference = qwen(with_lora=with_lora), qwen()
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    engine = functools.partial(WatchedRollout, model_config=MODEL, lora_alpha=LORA["alpha"], **KNOBS)
    config = ClusterConfig(
        role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh, Role.ROLLOUT: mesh},
        rollout_engine=engine,
        training_config=RLTrainingConfig(
            actor_optimizer=optax.sgd(1e-2), eval_every_n_steps=1000, max_steps=NUM_STEPS * num_iterations
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=OUTPUT_LEN,
            max_prompt_length=PROMPT_LEN,
            kv_cache_size=64,
            temperature=0.9,
            seed=jax.random.key(7),
            data_type=jnp.float32,
            return_logprobs=True,
        ),
    )
    cluster = RLCluster(actor=actor, reference=reference, tokenizer=Numbers(), cluster_config=config)
    how = {"num_generations": GROUP, "num_iterations": num_iterations, "beta": 0.04}
    if is_agentic:  # a call for every sample, from 16 threads
        algorithm = AgenticGRPOConfig(max_response_length=OUTPUT_LEN, max_concurrency=16, **how)
        learner = AgenticGRPOLearner(
            rl_cluster=cluster,
            algo_config=algorithm,
            reward_fns=mostly_even,
            chat_parser=PlainParser(cluster.tokenizer),
        )
    else:
        learner = GRPOLearner(rl_cluster=cluster, algo_config=GRPOConfig(**how), reward_fns=mostly_even)
    prompts = [" ".join(str(3 + (5 * i + j) % 80) for j in range(12)) for i in range(2 * NUM_STEPS)]
    learner.train([{"prompts": np.array(prompts[i : i + 2])} for i in range(0, len(prompts), 2)])
    rollout = cluster.rollout
    assert isinstance(rollout, WatchedRollout)
    stats = rollout.rollouts.call(lambda engine: (engine.audit(), engine.stats())[1])
    seen = {
        "steps": cluster.global_steps,
        "difference": max(rollout.differences),
        "different outputs": len(rollout.outputs),
        "weights set": rollout.rollouts.version,
        "generated tokens": stats.generated_tokens,
        "computed tokens": stats.computed_tokens,
        "held pages": stats.held_pages,
    }
    rollout.close()
    return seen


def from_many_threads() -> dict:
    """As the agentic learner does: one prompt a call from 16 threads, while weights are sent from another."""
    model = qwen()
    config = RolloutConfig(max_tokens_to_generate=OUTPUT_LEN, max_prompt_length=PROMPT_LEN, data_type=jnp.float32)
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    rollout = QuireRollout(model, Numbers(), mesh, config, model_config=MODEL, **KNOBS)
    is_over = threading.Event()

    def send() -> int:
        count = 0
        while not is_over.is_set():
            with jax.transfer_guard("disallow_explicit"):
                rollout.update_params(nnx.state(model, nnx.Param), (nnx.Param,))
            count += 1
        return count

    with ThreadPoolExecutor(17) as threads:
        sending = threads.submit(send)
        outputs = list(threads.map(lambda i: rollout.generate([f"{3 + i % 80} 4 5"], config), range(64)))
        is_over.set()
        count = sending.result()
    rollout.close()
    return {"outputs": sum(len(output.tokens[0]) > 0 for output in outputs), "weights set": count}


if __name__ == "__main__":
    RUNS = {
        "whole": lambda: learn(num_iterations=2),
        "lora": lambda: learn(with_lora=True),
        "agentic": lambda: learn(is_agentic=True),
        "threads": from_many_threads,
    }
    print(json.dumps({name: RUNS[name]() for name in sys.argv[1:] or RUNS}))
