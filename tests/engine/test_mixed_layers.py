"""A model whose layers differ in heads, head size, scale, and window: every layer has a cache
of its own shape, and sparse layers may stand beside dense ones of another kind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from cairn import SamplingParams
from cairn.attention.attend import Attend
from cairn.config import EngineConfig
from cairn.engine.build import build_runner
from cairn.engine.engine import Engine
from cairn.engine.memory_plan import plan_memory
from cairn.engine.resolve import resolve
from cairn.engine.scheduler import Scheduler
from cairn.errors import ConfigError
from cairn.memory.cache import PagedCache
from cairn.models.interface import LanguageModel
from cairn.models.parallel import Alone
from cairn.models.spec import AttentionSpec, ModelSpec

CPU = torch.device("cpu")
VOCAB = 29
LAYERS = (
    AttentionSpec(4, 2, 8, 0.5),
    AttentionSpec(6, 3, 4, 0.25, window=11),
    AttentionSpec(5, 1, 6, 0.75),
    AttentionSpec(4, 2, 8, 0.5),
)


class MixedModel(LanguageModel):
    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random) / 3

        self.layers = [
            (
                draw(VOCAB, own.num_heads, own.head_dim),
                draw(VOCAB, 2 * own.num_kv_heads, own.head_dim),
                draw(own.num_heads, own.head_dim, VOCAB),
            )
            for own in LAYERS
        ]
        self.spec = ModelSpec("Mixed", VOCAB, LAYERS, 512)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        first = x = one_hot(token_ids, VOCAB).double() + (0.1 * positions[:, None]).sin()
        for layer, (to_query, to_kv, to_out) in enumerate(self.layers):
            query, key_value = (torch.einsum("rv,vhd->rhd", x, w) for w in (to_query, to_kv))
            x = x + torch.einsum("rhd,hdv->rv", attend(layer, query, key_value), to_out).tanh()
        x = x - first  # what attention has added
        return x if logit_rows is None else x[logit_rows]

    def continued(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens, everything computed anew for each."""
        known = list(tokens)
        attend: Any = _attend
        for _ in range(count):
            places = torch.arange(len(known))
            logits = self(torch.tensor(known), places, places, attend, None)
            known.append(int(logits[-1].argmax()))
        return known[-count:]


def _attend(layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
    own = LAYERS[layer]
    group = own.num_heads // own.num_kv_heads
    key, value = (half.repeat_interleave(group, 1) for half in key_value.chunk(2, 1))
    rows = torch.arange(len(query))
    seen = rows[None] <= rows[:, None]
    if own.window is not None:
        seen &= rows[None] > rows[:, None] - own.window
    scores = torch.einsum("qhd,khd->hqk", query, key) * own.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def engine_of(model: MixedModel, **options: Any) -> Engine:
    given = {"page_size": 4, "kv_cache_gib": 0.001, "chunked_prefill_size": 16, **options}
    choices = resolve(EngineConfig(**given), model.spec, torch.float64, CPU)
    memory = plan_memory(choices)
    runner, _ = build_runner(choices, memory, model, Alone())
    for tensor in runner.stepper.pool.tensors():
        tensor.fill_(float("nan"))
    cache = PagedCache(choices.geometry, choices.groups, memory.num_pages)
    return Engine(
        model.spec,
        Scheduler(cache, memory.limits, time.perf_counter),
        runner,
        context_length=512,
        eos_token_ids=frozenset(),
        seed=0,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        # Every page is selected: sparse attention is then dense attention.
        {"attention_backend": "hsa", "hsa_layers": "0,3", "hsa_topk": 64, "hsa_window": 8}
        | {"hsa_dense_below": 0, "hsa_prefill": "sparse", "hsa_sinks": 0},
    ],
    ids=["dense", "sparse"],
)
def test_layers_of_several_kinds_in_one_model(options: dict[str, Any]) -> None:
    model = MixedModel()
    engine = engine_of(model, **options)
    assert [group.layers for group in engine.scheduler.cache.groups] == [(0, 3), (2,), (1,)]
    random = torch.Generator().manual_seed(0)
    shared = torch.randint(VOCAB, (19,), generator=random).tolist()
    prompts = [shared + torch.randint(VOCAB, (n,), generator=random).tolist() for n in (1, 9, 4)]
    params = SamplingParams(max_tokens=9)
    for _ in range(2):  # cold, then from the prefix cache
        requests = [request for p in prompts for request in engine.make_requests(p, params)]
        engine.submit_all(requests)
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
        for prompt, request in zip(prompts, requests, strict=True):
            assert list(request.token_ids[len(prompt) :]) == model.continued(prompt, 9)
    assert engine.scheduler.cache.stats.hit_tokens >= 3 * 16


def test_what_serves_one_kind_of_layer_says_so() -> None:
    with pytest.raises(ConfigError, match="hsa_layers: layers 0 and 2 of Mixed differ"):
        engine_of(MixedModel(), attention_backend="hsa")
