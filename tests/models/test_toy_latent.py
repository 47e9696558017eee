"""A model with a latent cache from outside of the package: through paged cache, prefix cache and
batches it says what it says when everything is computed anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cairn import LLM
from cairn.config import EngineConfig
from cairn.engine.resolve import resolve
from cairn.errors import ConfigError
from cairn.memory.layout import CacheLayout, CachePart
from cairn.models.spec import AttentionSpec, ModelSpec
from tests.helpers import TINY, poison_free_memory, tokens_of, write_model
from tests.models.toy_latent import attention

IMPL, BACKEND = "tests.models.toy_latent:build", "tests.models.toy_latent:LatentBackend"
CPU = torch.device("cpu")
WIDTH, WINDOW, LAYERS = 6, 9, 3
CONFIG: dict[str, Any] = {
    **TINY,
    "architectures": ["ToyLatentForCausalLM"],
    "num_hidden_layers": LAYERS,
    "latent_size": WIDTH,
    "sliding_window": WINDOW,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("latent"), CONFIG, impl=IMPL)


def load(folder: Path, **options: Any) -> LLM:
    options = {"page_size": 4, "dtype": "float64", "device": "cpu", **options}
    llm = LLM(folder, model_impl=IMPL, attention_backend=BACKEND, **options)
    poison_free_memory(llm.engine)
    return llm


def expected(llm: LLM, prompt: list[int], count: int) -> list[int]:
    """The next tokens, everything computed anew for each and nothing cached."""
    tokens = list(prompt)

    def attend(layer: int, query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        kept = latent.float() if layer == 1 else latent
        window = WINDOW if layer == 2 else None
        return attention(query, kept, 0, window, WIDTH**-0.5)

    whole: Any = attend
    for _ in range(count):
        places = torch.arange(len(tokens))
        with torch.inference_mode():
            logits = llm.engine.runner.stepper.model(
                torch.tensor(tokens), places, places, whole, None
            )
        tokens.append(int(logits[-1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("chunk", [5, 64])
def test_cached_and_batched_rows_say_what_the_whole_says(folder: Path, chunk: int) -> None:
    with load(folder, chunked_prefill_size=chunk) as llm:
        cache = llm.engine.scheduler.cache
        assert [(group.name, group.layers) for group in cache.groups] == [
            ("full", (0,)),
            ("full-2", (1,)),
            (f"window-{WINDOW}", (2,)),
        ]
        prompts = [tokens_of(22) + tokens_of(n, seed=n) for n in (1, 6, 13, 2)]
        wanted = [expected(llm, prompt, 12) for prompt in prompts]
        for asked in (2, 4):  # the second time from the prefix cache
            results = llm.generate(prompts[:asked], max_tokens=12, ignore_eos=True)
            assert [result.token_ids for result in results] == wanted[:asked]
            llm.engine.scheduler.check()
        assert cache.stats.hit_tokens >= 4 * 20
        assert all(usage.owned == 0 for usage in llm.engine.usage())


def test_few_pages_retract_requests_and_change_nothing(folder: Path) -> None:
    page_bytes = 2 * 4 * WIDTH * 8 + 4 * WIDTH * 4
    with load(folder, kv_cache_gib=14 * page_bytes / 2**30, max_running_requests=4) as llm:
        prompts = [tokens_of(11, seed=i) for i in range(4)]
        wanted = [expected(llm, prompt, 20) for prompt in prompts]
        results = llm.generate(prompts, max_tokens=20, ignore_eos=True)
        assert [result.token_ids for result in results] == wanted
        assert llm.engine.scheduler.stats.retractions > 0


def test_attention_refuses_layers_it_cannot_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match="layers keep latent; it reads kv"):
        LLM(folder, model_impl=IMPL, attention_backend="torch", device="cpu")
    with pytest.raises(ConfigError, match=r"hsa, which reads keys and values.* keep latent"):
        LLM(folder, model_impl=IMPL, attention_backend="hsa", hsa_layers="0", device="cpu")
    kv = CacheLayout.of_heads(1, WIDTH)
    both = CacheLayout((*kv.parts, CachePart("latent", (WIDTH,))))
    spec = ModelSpec("Toy", 31, (AttentionSpec(3, 1, WIDTH, 0.4, cache=both),), 512)
    with pytest.raises(ConfigError, match=r"enable_hisparse moves keys .* keep kv, latent"):
        resolve(EngineConfig(enable_hisparse=True), spec, torch.float64, CPU)
