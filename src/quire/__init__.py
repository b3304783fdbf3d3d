"""Quire: a JAX-native inference engine for language models on a paged KV cache.

Importing the package loads nothing heavy: each public name is fetched from its module on first use, so
`quire.core` can be imported and tested in a process where jax is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import AttentionConfig, EngineConfig, ModelConfig
    from quire.core.errors import AuditError
    from quire.core.request import Request
    from quire.core.sampling_params import SamplingParams
    from quire.core.stopping import FinishReason
    from quire.distributed.errors import GroupError
    from quire.engine.engine import Engine
    from quire.following import follow
    from quire.job import GenerationInterrupted
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.rollouts import RolloutBatch, RolloutGroup, Rollouts
    from quire.structured.form import Structured

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "quire.async_llm",
    "AttentionConfig": "quire.config",
    "AuditError": "quire.core.errors",
    "CompletionOutput": "quire.outputs",
    "Engine": "quire.engine.engine",
    "EngineConfig": "quire.config",
    "FinishReason": "quire.core.stopping",
    "GenerationInterrupted": "quire.job",
    "GroupError": "quire.distributed.errors",
    "LLM": "quire.llm",
    "ModelConfig": "quire.config",
    "Request": "quire.core.request",
    "RequestOutput": "quire.outputs",
    "RolloutBatch": "quire.rollouts",
    "RolloutGroup": "quire.rollouts",
    "Rollouts": "quire.rollouts",
    "SamplingParams": "quire.core.sampling_params",
    "Structured": "quire.structured.form",
    "follow": "quire.following",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionConfig",
    "AuditError",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GenerationInterrupted",
    "GroupError",
    "ModelConfig",
    "Request",
    "RequestOutput",
    "RolloutBatch",
    "RolloutGroup",
    "Rollouts",
    "SamplingParams",
    "Structured",
    "follow",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
