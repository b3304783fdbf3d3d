"""The policy of a training step: log-probabilities equal to the engine's, with a gradient.

A ratio of two policies is 1 where they are one policy only if both sides add up in the same order. In bfloat16 on a CPU
`logprobs` therefore runs the engine's own kernels over whole sequences, and bit for bit the log-probabilities are those
that the engine reports (docs/training.md says what is guaranteed where). Its gradient is that of the same model in
plain JAX, computed layer by layer: of the forward only the layers' inputs are kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from quire.config import DEFAULT_DTYPE, DTYPES, MAX_DIMENSION, AttentionConfig, ModelConfig, check_whole
from quire.device import kv_cache
from quire.device.attention import choose_backend, get_backend
from quire.device.inputs import BatchLayout
from quire.device.linear import MatmulKind, choose_kind, convert_in_jit
from quire.device.mesh import ArraySpec, make_mesh
from quire.device.models import get_architecture
from quire.device.models.layers import ModelStatics, Params, decoder, unembed
from quire.device.models.tensors import dtype_name, has_tensor_names
from quire.device.models.weights import check_dtype, weight_specs
from quire.device.pointwise import rounded, soft_cap
from quire.device.sampler import token_logprobs

PAGE_SIZE = 16
"""An engine's own, by default. Pages of 32, 64 and 128 give the same bits."""
ROWS_AT_ONCE = 256
"""Tokens whose logits are in memory together."""


def logprobs(
    params: Params,
    tokens: Int[Array, "B W"],
    config: ModelConfig,
    *,
    start: int = 1,
    mask: Bool[Array, "B W"] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    dtype: str = DEFAULT_DTYPE,
) -> Float[Array, "B X"]:
    """The log-probability of each token from `start` on, given all before it in its row: entry i is of
    `tokens[:, start + i]`. Differentiable by `params`; for use inside `jax.jit`, with `config` fixed.

    `params` are weights in the layout of docs/weights.md, of the engine's type `dtype` or of a wider float; these are
    cast to `dtype`, and the gradient is cast back. `mask` is True where there is a token: a row may be padded at both
    ends, not in between, as the prompts and tokens of a `RolloutBatch` are. What has no token, or none before it, gets
    0. Which tokens count for a loss is for the loss to say.

    With `temperature`, `top_k` and `top_p` the log-probability is under what a request with these is drawn from: what
    the engine reports as processed. A token that is cut off has -inf and no gradient. Which tokens are cut off is not
    differentiated. docs/training.md says which of the two a ratio needs.

    In bfloat16 on one CPU device these are bit for bit the log-probabilities that an engine reports which is not
    quantised (docs/training.md).
    """
    if not isinstance(config, ModelConfig) or not isinstance(params, Mapping):
        kinds = f"params is of type {type(params).__name__} and config of type {type(config).__name__}"
        raise ValueError(f"{kinds}: give logprobs(params, tokens, config), a dict, an array and a ModelConfig")
    if has_tensor_names(params):
        raise ValueError("params has Hugging Face names: make it a tree with quire.weights.from_huggingface")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if not hasattr(tokens, "ndim") or not jnp.issubdtype(tokens.dtype, jnp.integer):
        kind = getattr(tokens, "dtype", type(tokens).__name__)
        raise ValueError(f"tokens is of type {kind}: give an array of whole numbers, [rows, length]")
    if tokens.ndim != 2 or (mask is not None and mask.shape != tokens.shape):
        shapes = f"tokens {tokens.shape}" + ("" if mask is None else f", mask {mask.shape}")
        raise ValueError(f"{shapes}: tokens are [rows, length], and mask has their shape")
    last = tokens.shape[1] - 1
    if not 1 <= start <= last:
        raise ValueError(f"start={start} must be from 1, which has a token before it, to {last}, the last of a row")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be above 0 and finite: at 0 every token drawn is certain")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1, which keeps every token")
    check_whole("top_k", top_k, 0, MAX_DIMENSION)
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        check_dtype(f"params{jax.tree_util.keystr(path)}", dtype_name(array), dtype)
    policy = _Policy(config, start, float(temperature), top_k, float(top_p), dtype)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask)
    tokens = jnp.where(mask, tokens, 0)
    compute = _native if policy.is_native else _plain
    scores = compute(policy, params, tokens, jnp.argmax(mask, axis=1))
    has_score = mask[:, start:] & mask[:, start - 1 : -1]  # a token, and another before it
    return jnp.where(has_score, scores, 0.0)


@dataclass(frozen=True)
class _Policy:
    """What is fixed when a training step is compiled."""

    config: ModelConfig
    start: int
    temperature: float
    top_k: int
    top_p: float
    dtype: str

    @property
    def kind(self) -> MatmulKind:
        return choose_kind("auto", None, self.dtype, make_mesh())

    @property
    def is_native(self) -> bool:
        device = make_mesh().devices.flat[0]
        name, _ = choose_backend("auto", self.config, device.platform, device.device_kind)
        return self.kind.native and name == "native"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _native(policy: _Policy, params: Params, tokens_BW: jax.Array, first_B: jax.Array) -> jax.Array:
    """By the kernels of the engine."""
    statics = ModelStatics(policy.config, get_backend("native"), make_mesh(), native=True)
    prepared = _prepared(policy, _rounded(policy, params), policy.kind)
    return _score(policy, statics, prepared, tokens_BW, first_B)


def _plain(policy: _Policy, params: Params, tokens_BW: jax.Array, first_B: jax.Array) -> jax.Array:
    """In plain JAX, which has a gradient."""
    return _score_plainly(policy, jax.tree.map(lambda x: x.astype(policy.dtype), params), tokens_BW, first_B)


def _score_plainly(policy: _Policy, params: Params, tokens_BW: jax.Array, first_B: jax.Array) -> jax.Array:
    """In the type that the weights have."""
    statics = ModelStatics(policy.config, _CausalBackend(), make_mesh())
    prepared = _prepared(policy, params, MatmulKind(native=False, int8=False))
    return _score(policy, statics, prepared, tokens_BW, first_B)


def _rounded(policy: _Policy, params: Params) -> Params:
    """The weights as the engine has them: really rounded, whatever they are used for next."""
    return jax.tree.map(lambda x: rounded(x.astype(jnp.float32), jnp.dtype(policy.dtype)), params)


def _native_forward(policy: _Policy, params: Params, tokens_BW: jax.Array, first_B: jax.Array) -> Any:
    return _native(policy, params, tokens_BW, first_B), (params, tokens_BW, first_B)


def _native_backward(policy: _Policy, kept: Any, gradient: jax.Array) -> Any:
    """Of the rounded weights, in float32: XLA's bfloat16 is slower on a CPU, and less exact."""
    params, tokens_BW, first_B = kept
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), _rounded(policy, params))
    _, backward = jax.vjp(lambda params: _score_plainly(policy, params, tokens_BW, first_B), exact)
    (slopes,) = backward(gradient)
    return jax.tree.map(lambda slope, x: slope.astype(x.dtype), slopes, params), None, None


_native.defvjp(_native_forward, _native_backward)


def _prepared(policy: _Policy, params: Params, kind: MatmulKind) -> Params:
    """The weights as `linear` wants them."""

    def convert(spec: Any, array: jax.Array) -> Any:
        return array if spec.contracted_axis is None else convert_in_jit(array, spec.contracted_axis, kind)

    prepared = jax.tree.map(convert, weight_specs(policy.config), params)
    if policy.config.tie_embeddings:
        prepared["unembed"] = convert_in_jit(prepared["embed"], 1, kind)
    return prepared


def _score(
    policy: _Policy, statics: ModelStatics, params: Params, tokens_BW: jax.Array, first_B: jax.Array
) -> jax.Array:
    """[B, W - start], what is padding included."""
    num_rows, width = tokens_BW.shape
    column_1W = jnp.arange(width)[None, :]
    # A row begins with its first token: what was padded on the left comes behind the last.
    turned_BW = jnp.take_along_axis(tokens_BW, (column_1W + first_B[:, None]) % width, axis=1)
    cache, layout = _whole_sequences(statics, num_rows, width, params["embed"].dtype)
    architecture = get_architecture(policy.config.architecture)
    layer = _remembering_inputs(architecture.layer)
    hidden_TD, _ = decoder(layer, params, (cache,), turned_BW.reshape(-1), layout, statics)
    # Each token is predicted where the one before it is.
    predictor_BX = (column_1W[:, policy.start - 1 : -1] - first_B[:, None]) % width
    hidden_SD = hidden_TD.reshape(num_rows, width, -1)[jnp.arange(num_rows)[:, None], predictor_BX]
    targets_S = tokens_BW[:, policy.start :].reshape(-1)
    scores_S = _score_blocks(policy, statics, params, hidden_SD.reshape(-1, hidden_SD.shape[-1]), targets_S)
    return scores_S.reshape(num_rows, -1)


def _score_blocks(
    policy: _Policy, statics: ModelStatics, params: Params, hidden_SD: jax.Array, targets_S: jax.Array
) -> jax.Array:
    """Some tokens at a time: the logits of all would be the largest array of a training step."""
    num_samples = len(targets_S)
    block = min(ROWS_AT_ONCE, max(num_samples, 1))
    missing = -num_samples % block

    @jax.checkpoint
    def score(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_SD, targets_S = args
        logits_SV = unembed(params, hidden_SD, statics.config)
        cut = {"temperature": policy.temperature, "top_k": policy.top_k, "top_p": policy.top_p}
        return token_logprobs(logits_SV, targets_S, **cut, native=statics.native)

    hidden = jnp.pad(hidden_SD, ((0, missing), (0, 0))).reshape(-1, block, hidden_SD.shape[1])
    return jax.lax.map(score, (hidden, jnp.pad(targets_S, (0, missing)).reshape(-1, block))).reshape(-1)[:num_samples]


def _remembering_inputs(layer: Any) -> Any:
    """The layer, of which a gradient keeps the inputs and computes the rest again."""

    def call(*arrays: Any, attention: AttentionConfig, statics: ModelStatics) -> Any:
        return jax.checkpoint(partial(layer, attention=attention, statics=statics))(*arrays)

    return call


def _whole_sequences(
    statics: ModelStatics, num_rows: int, width: int, dtype: Any
) -> tuple[kv_cache.KVCache, BatchLayout]:
    """An empty pool with pages for all rows, and the layout of a step that computes them from their first token on."""
    pages_per_row = -(-width // PAGE_SIZE)
    num_pages = num_rows * pages_per_row
    row_B1, column_1W = np.arange(num_rows, dtype=np.int32)[:, None], np.arange(width, dtype=np.int32)[None, :]
    cache = kv_cache.abstract(
        statics.backend,
        statics.config.attention,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=jnp.dtype(dtype),
        mesh=statics.mesh,
    )
    layout = BatchLayout(
        # Behind a barrier: in the engine they are data, and XLA computes with constants by other code.
        positions_T=jax.lax.optimization_barrier(jnp.asarray(np.tile(column_1W[0], num_rows))),
        destinations_T=jnp.asarray((row_B1 * pages_per_row * PAGE_SIZE + column_1W).reshape(-1)),
        page_table_BP=jnp.asarray(np.arange(num_pages, dtype=np.int32).reshape(num_rows, pages_per_row)),
        kv_lens_B=jnp.full(num_rows, width, jnp.int32),
        cu_q_lens_B1=jnp.asarray(np.arange(num_rows + 1, dtype=np.int32) * width),
        decode=False,
    )
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), cache), layout


@dataclass(frozen=True)
class _CausalBackend:
    """Attention over whole sequences of one length, as a textbook has it: nothing is kept in pages."""

    def arrays(
        self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> tuple[ArraySpec, ...]:
        """None."""
        return ()

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """Every token over those before it in its row and itself."""
        num_rows, (num_tokens, num_kv_heads, head_dim) = layout.kv_lens_B.shape[0], k_TKH.shape
        shape = (num_rows, num_tokens // num_rows, num_kv_heads, -1, head_dim)
        q_BWKGH, k_BWKH, v_BWKH = (
            q_TNH.reshape(shape),
            k_TKH.reshape(*shape[:3], head_dim),
            v_TKH.reshape(*shape[:3], head_dim),
        )
        exact = {"precision": "highest", "preferred_element_type": jnp.float32}
        scores_BKGQC = jnp.einsum("bqkgh,bckh->bkgqc", q_BWKGH, k_BWKH, **exact) * attention.scale
        scores_BKGQC = soft_cap(scores_BKGQC, attention.soft_cap)
        distance_QC = np.arange(shape[1])[:, None] - np.arange(shape[1])[None, :]
        seen_QC = (distance_QC >= 0) & (distance_QC < (attention.window or shape[1]))
        scores_BKGQC = jnp.where(seen_QC, scores_BKGQC, -jnp.inf)
        if sinks_N is not None:
            sinks = sinks_N.reshape(num_kv_heads, -1, 1, 1)
            sinks = jnp.broadcast_to(sinks, (*scores_BKGQC.shape[:-1], 1))
            scores_BKGQC = jnp.concatenate([scores_BKGQC, sinks], axis=-1)
        weights_BKGQC = jax.nn.softmax(scores_BKGQC, axis=-1)[..., : shape[1]].astype(v_TKH.dtype)
        out_BQKGH = jnp.einsum("bkgqc,bckh->bqkgh", weights_BKGQC, v_BWKH, **exact)
        return out_BQKGH.reshape(q_TNH.shape).astype(q_TNH.dtype), kv
