"""What of SGLang's server goes together with hsa. What was not tried is refused."""

from __future__ import annotations

from typing import Any

from cairn.errors import ConfigError

_ONE_OF_EACH = ("tp_size", "pp_size", "dp_size", "ep_size", "attn_cp_size")
_OFF = (
    "speculative_algorithm",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_hisparse",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_memory_saver",
    "enable_unified_memory",
)


def refuse_features(args: Any) -> None:
    """`args` are SGLang's server arguments; those that a version does not have are not set."""
    prefill = args.prefill_attention_backend or args.attention_backend
    decode = args.decode_attention_backend or args.attention_backend
    if (prefill, decode) != ("hsa", "hsa"):
        raise ConfigError(
            f"prefill is computed by {prefill} and decode by {decode}; pages written by another "
            "backend would have no landmarks: give --attention-backend hsa alone (dense_below "
            "reads short prompts densely)"
        )
    for name in _ONE_OF_EACH:
        value = getattr(args, name, 1)
        if value not in (None, 1):
            raise ConfigError(f"{name} is {value}; hsa runs on one device: leave it out")
    for name in _OFF:
        value = getattr(args, name, None)
        if value:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{name} is {value!r}; hsa does not work with it: leave {flag} out")
    mode = getattr(args, "disaggregation_mode", "null")
    if mode != "null":
        raise ConfigError(
            f"disaggregation_mode is {mode!r}; pages that come from elsewhere would have no "
            "landmarks: leave --disaggregation-mode out"
        )
    graphs = getattr(args, "cuda_graph_config", None)
    if args.device == "cuda" and graphs is not None:
        backend = graphs.prefill.backend
        if getattr(backend, "value", backend) != "disabled":
            raise ConfigError(
                f"prefill is recorded as CUDA graphs ({backend}); hsa records decode steps only: "
                "give --cuda-graph-backend-prefill disabled"
            )
