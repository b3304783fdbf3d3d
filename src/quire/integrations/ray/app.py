"""A model as an application of Ray Serve: engines as replicas, and the ingress in front of them."""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Unpack

from ray.serve import deployment
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from quire.config import EngineConfig, EngineKnobs, check_whole
from quire.integrations.ray.autoscaling import QueuedTokens
from quire.integrations.ray.ingress import Ingress
from quire.integrations.ray.replica import EngineReplica
from quire.integrations.ray.request_router import PrefixRouter
from quire.routing.router import MAX_IMBALANCE_TOKENS
from quire.server.config import ServerConfig
from quire.server.keys import Keys, key_limits

MAX_ONGOING = 1 << 16
"""Requests of one replica: what waits there is bounded by its own queue, which answers 429 with a time to retry."""
REPORT_PERIOD_S = 1.0
SERVES_OWN = (
    "host", "port", "grpc_port", "admin_port", "max_connections", "otlp_endpoint",
    "batch_folder", "max_batch_file_bytes", "max_batch_bytes",
)  # fmt: skip
"""Fields of ServerConfig that are Serve's business, or need a port, or a folder that belongs to one server."""


def build_app(
    model: str,
    *,
    revision: str | None = None,
    num_replicas: int | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    target_queued_tokens: int = 4096,
    prefix_routing: bool = True,
    max_imbalance_tokens: int = MAX_IMBALANCE_TOKENS,
    api_keys: Sequence[str] = (),
    server: ServerConfig | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    num_ingresses: int = 1,
    ingress_actor_options: Mapping[str, Any] | None = None,
    **knobs: Unpack[EngineKnobs],
) -> Any:
    """An application for `serve.run`: OpenAI's API on Serve's own proxy, over replicas of an engine.

    `model`, `revision` and `knobs` are those of `LLM`. There are `num_replicas` engines, one by default, or as many as
    keep `target_queued_tokens` to be computed on each, between the bounds of `autoscaling_config` (fields of Serve's
    `AutoscalingConfig`). Requests go to where their beginning is cached, unless that engine has
    `max_imbalance_tokens` more to do than another; with `prefix_routing=False`, to where Serve's default router sends
    them. Without `api_keys` only this machine is served. `server` has the limits and the model's name; where to listen
    is said to `serve.start`. `ray_actor_options` are the resources of an engine, `ingress_actor_options` those of each
    of `num_ingresses` processes that requests pass through.
    """
    config = server or ServerConfig()
    _check_server(config)
    check_whole("target_queued_tokens", target_queued_tokens, 1, 1 << 40)
    check_whole("max_imbalance_tokens", max_imbalance_tokens, 0, 1 << 40)
    if num_replicas is not None and autoscaling_config is not None:
        raise ValueError(f"num_replicas={num_replicas} and autoscaling_config exclude each other; give one")
    EngineConfig(**knobs)  # checked here, not in a process elsewhere
    keys = Keys(api_keys, flag="api_keys", limits=key_limits(config))
    name = config.served_model_name or model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    common = (model, revision, name, config, keys, knobs)
    scaling: dict[str, Any] = {"num_replicas": num_replicas or 1}
    if autoscaling_config is not None:
        policy = AutoscalingPolicy(
            policy_function=QueuedTokens, policy_kwargs={"target_queued_tokens": target_queued_tokens}
        )
        scaling = {"autoscaling_config": AutoscalingConfig(**autoscaling_config, policy=policy)}
    routing: dict[str, Any] = {}
    if prefix_routing:
        routing = {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"max_imbalance_tokens": max_imbalance_tokens},
        }
    engines = deployment(
        EngineReplica,
        name="QuireEngine",
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=dict(ray_actor_options or {}),
        request_router_config=RequestRouterConfig(request_routing_stats_period_s=REPORT_PERIOD_S, **routing),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        **scaling,
    )
    ingress = deployment(
        Ingress,
        name="QuireIngress",
        num_replicas=num_ingresses,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options=dict(ingress_actor_options or {}),
        graceful_shutdown_timeout_s=config.drain_timeout_s,
    )
    return ingress.bind(engines.bind(*common), *common)


def _check_server(config: ServerConfig) -> None:
    default = ServerConfig()
    for field in fields(ServerConfig):
        value = getattr(config, field.name)
        if field.name in SERVES_OWN and value != getattr(default, field.name):
            raise ValueError(f"server: {field.name}={value!r} has no effect behind Ray Serve; leave it out")
