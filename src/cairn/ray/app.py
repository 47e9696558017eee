"""The application: `serve run cairn.ray.app:build model=smollm2 replicas=2 gpus=1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from cairn.ray.ingress import Ingress
from cairn.ray.options import read_options
from cairn.ray.replica import Replica
from cairn.ray.router import PrefixRouter

_AFTER_DRAIN = 5  # seconds to stop the engine
_OTHERS = 64  # short requests such as /health, beside those that generate


def build(given: Mapping[str, Any]) -> serve.Application:
    """Takes the options of `cairn serve` except host and port, and those of `cairn.ray.options`."""
    replicas, options, engine = read_options(given)
    # Ray's own limits never apply: the replica queues, batches and refuses by itself.
    at_once = options.max_concurrent_requests + _OTHERS
    quiet = LoggingConfig(enable_access_log=False)  # the replica logs its requests
    replica = serve.deployment(
        name="Replica",
        num_replicas=replicas.replicas,
        max_replicas_per_node=replicas.replicas_per_node,
        max_ongoing_requests=at_once,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        health_check_period_s=replicas.health_period,
        health_check_timeout_s=replicas.health_timeout,
        graceful_shutdown_timeout_s=options.drain_timeout + _AFTER_DRAIN,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"imbalance": replicas.imbalance},
        ),
        logging_config=quiet,
    )(Replica)
    # A single ingress: it holds the table of prefix owners.
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=at_once * replicas.replicas,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )(Ingress)
    return ingress.bind(replica.bind(engine, options), options.max_body_bytes)
