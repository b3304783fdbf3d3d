"""A policy learns from its own samples, in one program: group-relative policy optimisation (GRPO).

Quire draws the samples, `quire.train.logprobs` is the policy that is trained, optax updates it, and the engine gets the
new weights between two batches. Both sides run the same kernels, so the first ratio of every batch is exactly 1.

    pip install quire-llm optax matplotlib
    python examples/grpo.py                                     # a tiny model from random weights: minutes
    python examples/grpo.py --model MODEL.gguf --updates 20     # a real one learns to give short answers

The tiny model must answer with even tokens where its prompt begins with 2, and with odd ones where that begins with 1;
by chance half of them are.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from quire import AttentionConfig, ModelConfig, RequestOutput, RolloutBatch, Rollouts, SamplingParams
from quire.config import RotaryConfig
from quire.train import logprobs
from quire.weights import from_huggingface

Prompt = list[int] | str


@dataclass
class Task:
    """What is learnt, and how much of it at a time."""

    make_prompt: Callable[[np.random.Generator], Prompt]
    reward: Callable[[RequestOutput, Any], float]
    """Of one sample, from 0 to 1."""
    sampling: SamplingParams
    prompt_len: int
    """Of the longest prompt."""
    num_prompts: int
    learning_rate: float
    kl_weight: float
    epochs: int
    """Updates by each batch."""
    goal: float
    """The least mean reward at the end."""


def parity(sample: RequestOutput, answer: Any) -> float:
    """The share of tokens with the parity of the prompt's first token."""
    return float(np.mean(np.array(answer.token_ids) % 2 == sample.prompt_token_ids[0] % 2))


TINY = Task(
    make_prompt=lambda rng: [int(rng.integers(1, 3)), *rng.integers(1, 16, 3).tolist()],
    reward=parity,
    sampling=SamplingParams(temperature=1, n=8, max_tokens=8, ignore_eos=True, logprobs=0),
    prompt_len=4,
    num_prompts=32,
    learning_rate=2e-3,
    kl_weight=0.005,
    epochs=2,
    goal=0.95,
)


def make_question(rng: np.random.Generator) -> str:
    """A sum of two digits, as a chat."""
    a, b = rng.integers(2, 10, 2)
    question = f"What is {a} plus {b}? Answer with the number only."
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def short_and_right(sample: RequestOutput, answer: Any) -> float:
    """Half for an answer that ends by itself within the limit, and half if the last number in it is the right one."""
    terms = [int(digit) for digit in re.findall(r"is (\d) plus (\d)\?", sample.prompt or "")[0]]
    numbers = re.findall(r"\d+", answer.text)
    return 0.5 * (answer.finish_reason != "length") + 0.5 * (numbers[-1:] == [str(sum(terms))])


REAL = Task(
    make_prompt=make_question,
    reward=short_and_right,
    sampling=SamplingParams(temperature=1, n=8, max_tokens=16, logprobs=0),
    prompt_len=24,
    num_prompts=4,
    learning_rate=3e-5,
    kl_weight=0.01,
    epochs=1,
    goal=0.4,
)


def tiny_model(seed: int) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """A Llama of 100,000 parameters, and random weights under Hugging Face names."""
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rotary=RotaryConfig())
    config = ModelConfig(
        architecture="llama", vocab_size=16, hidden_size=64, intermediate_size=192, attention=(attention,) * 2,
        max_len=64, norm_eps=1e-5, tie_embeddings=False, eos_ids=(0,),
    )  # fmt: skip
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(16, 64), "model.norm.weight": np.ones(64, np.float32)}
    tensors["lm_head.weight"] = 0.2 * normal(16, 64)  # all tokens about equally likely
    for i in range(2):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = np.ones(64, np.float32)
        for name, outputs, inputs in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 64, 64)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = normal(outputs, inputs)
        for name, outputs, inputs in (("gate", 192, 64), ("up", 192, 64), ("down", 64, 192)):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = normal(outputs, inputs)
    return config, tensors


@jax.jit
def to_engine(params: Any) -> Any:
    """The weights in the type that the engine computes in."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


class Trainer:
    """The policy, its optimiser, and the policy it may not stray from."""

    def __init__(self, config: ModelConfig, params: Any, task: Task, num_updates: int) -> None:
        """Start from float32 weights in the layout of docs/weights.md."""
        self.params, self.reference = params, to_engine(params)
        rate = optax.cosine_decay_schedule(task.learning_rate, num_updates, alpha=0.1)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.state = self.optimizer.init(params)
        policy = partial(logprobs, config=config, start=task.prompt_len)
        self.score = jax.jit(lambda params, tokens, mask: policy(params, tokens, mask=mask))

        def loss(params, tokens, mask, old, reference, advantages):
            new = policy(params, tokens, mask=mask)
            is_output = mask[:, task.prompt_len :]
            ratio = jnp.exp(new - old)
            gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
            kl = jnp.exp(reference - new) - (reference - new) - 1  # never negative, and right on average
            means = {"kl": kl, "loss": task.kl_weight * kl - gain}
            means = {name: jnp.sum(x * is_output) / jnp.sum(is_output) for name, x in means.items()}
            off = jnp.max(jnp.abs(jnp.where(is_output, ratio, 1) - 1))
            return means["loss"], means | {"ratio_off": off}

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params, state, *batch):
            (_, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params, *batch)
            changes, state = self.optimizer.update(gradient, state, params)
            return optax.apply_updates(params, changes), state, metrics

        self._update = update

    def train(self, batch: RolloutBatch, rewards: np.ndarray, epochs: int) -> list[dict[str, float]]:
        """Update by a batch so many times; what each update saw."""
        tokens = np.concatenate([batch.prompts, batch.tokens], axis=1)
        mask = np.concatenate([batch.prompt_mask, batch.mask], axis=1)
        # A group that differs by little says little: its spread is taken as no less than 0.1.
        spread = np.maximum(rewards.std(axis=1, keepdims=True), 0.1)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
        reference = self.score(self.reference, tokens, mask)
        arrays = (tokens, mask, batch.logprobs, reference, advantages.reshape(-1, 1).astype(np.float32))
        seen = []
        for _ in range(epochs):
            self.params, self.state, metrics = self._update(self.params, self.state, *arrays)
            seen.append({name: float(value) for name, value in metrics.items()})
        return seen


def run(rollouts: Rollouts, trainer: Trainer, task: Task, args: argparse.Namespace) -> list[dict[str, float]]:
    """Sample, reward, update, until it is learnt: one line of figures for each batch."""
    rng, curve, num_updates = np.random.default_rng(args.seed), [], 0
    while num_updates < args.updates:
        began = time.perf_counter()
        for i in range(task.num_prompts):
            params = replace(task.sampling, seed=(args.seed * 1_000 + num_updates) * 1_000 + i)
            rollouts.submit(task.make_prompt(rng), params, group=i)
        groups = sorted(rollouts.collect(groups=task.num_prompts), key=lambda group: group.group)
        batch = RolloutBatch.of(groups, prompt_len=task.prompt_len, max_tokens=task.sampling.max_tokens)
        sampled = time.perf_counter()
        samples = [output for group in groups for output in group.outputs]
        rewards = np.array([[task.reward(sample, answer) for answer in sample.outputs] for sample in samples])
        seen = trainer.train(batch, rewards, task.epochs)
        staleness = num_updates + (task.epochs - 1) / 2 - batch.versions[batch.mask].mean()
        num_updates += task.epochs
        rollouts.set_weights(to_engine(trainer.params), version=num_updates, copy=False)
        figures = {
            "updates": num_updates,
            "reward": rewards.mean(),
            "kl": seen[-1]["kl"],
            "first_ratio_off": seen[0]["ratio_off"],
            "last_ratio_off": seen[-1]["ratio_off"],
            "staleness": staleness,
            "tokens_per_s": batch.mask.sum() / (sampled - began),
            "seconds": time.perf_counter() - began,
        }
        curve.append({name: float(value) for name, value in figures.items()})
        if len(curve) % args.every == 1 % args.every:
            print(" ".join(f"{name} {value:.4g}" for name, value in curve[-1].items()), flush=True)
        if len(curve) >= 5 and smooth_reward(curve) >= args.enough:
            break
    return curve


def smooth_reward(curve: list[dict[str, float]]) -> float:
    """The mean of the last five batches."""
    return float(np.mean([point["reward"] for point in curve[-5:]]))


def draw(curve: list[dict[str, float]], path: str) -> None:
    """Reward, KL, ratio, staleness and speed over updates."""
    import matplotlib.pyplot as plt

    panels = {
        "mean reward": ["reward"],
        "KL to the first policy": ["kl"],
        "largest |ratio - 1|": ["first_ratio_off", "last_ratio_off"],
        "staleness, updates": ["staleness"],
        "tokens a second, sampling": ["tokens_per_s"],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(16, 2.8), layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            label = {"first_ratio_off": "first update of a batch", "last_ratio_off": "last"}.get(name)
            axis.plot([point["updates"] for point in curve], [point[name] for point in curve], label=label)
        axis.set(title=title, xlabel="updates")
        if len(names) > 1:
            axis.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> int:
    """Learn, draw, say how well it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or GGUF file with SmolLM2's chat format; without it, a tiny model")
    parser.add_argument("--updates", type=int, default=200, help="at most (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", help="a file to draw the curves to, .svg or .png")
    parser.add_argument("--json", help="a file to write the figures of every batch to")
    parser.add_argument("--enough", type=float, default=0.97, help="stop when the mean reward is there (0.97)")
    parser.add_argument("--goal", type=float, help="exit with 1 if it ends below (0.95; with a model 0.4)")
    parser.add_argument("--every", type=int, default=10, help="print one batch of so many (10)")
    args = parser.parse_args()
    if min(args.updates, args.every) < 1:
        parser.error(f"--updates {args.updates} and --every {args.every} must be at least 1")

    knobs = {"max_num_seqs": 128, "max_num_batched_tokens": 128, "quiet": True, "dtype": "bfloat16"}
    if args.model:
        task, rollouts = REAL, Rollouts(args.model, max_model_len=128, **knobs)
        params = rollouts.call(lambda engine: engine.params)
    else:
        task, (config, tensors) = TINY, tiny_model(args.seed)
        params = from_huggingface(tensors, config, dtype="float32")
        rollouts = Rollouts.from_params(config, to_engine(params), num_pages=512, **knobs)
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    with rollouts:
        rollouts.set_weights(to_engine(masters), version=0)
        curve = run(rollouts, Trainer(rollouts.llm.model_config, masters, task, args.updates), task, args)
    if args.json:
        Path(args.json).write_text(json.dumps(curve))
    if args.plot:
        draw(curve, args.plot)
    first, last = curve[0]["reward"], smooth_reward(curve)
    ratio = max(point["first_ratio_off"] for point in curve)
    print(f"the first ratio of a batch was off 1 by at most {ratio}; {sum(p['seconds'] for p in curve):.0f} s")
    print(f"mean reward {last:.3f} after {curve[-1]['updates']:.0f} updates, from {first:.3f}")
    return 0 if last >= (task.goal if args.goal is None else args.goal) else 1


if __name__ == "__main__":
    sys.exit(main())
