"""The entry point that SGLang calls in each of its processes, before it reads its arguments.

SGLang logs what a plug-in raises and goes on without it. So everything that can fail comes before
the name is offered: a server asked for `hsa` then stops at its command line, and
`cairn doctor --sglang` says why.
"""

from __future__ import annotations

import logging

NAME = "hsa"
MODELS = "cairn.sglang.models"


def register() -> None:
    """May be called again."""
    try:
        _register()
    except Exception:
        logging.getLogger("cairn").error(
            "the hsa backend is not registered with SGLang, for the reason that follows; see "
            "`cairn doctor --sglang`"
        )
        raise


def _register() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from cairn.sglang.backend import CairnAttnBackend
    from cairn.sglang.hf_config import register_configs
    from cairn.sglang.hooks import register_hooks

    register_configs()
    ModelRegistry.register(MODELS, overwrite=True, strict=True)
    register_hooks()
    register_attention_backend(NAME)(CairnAttnBackend)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
