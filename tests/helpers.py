"""Tiny models on disk, and memory that shows when somebody reads what is not theirs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from cairn.cli.main import main
from cairn.engine.engine import Engine
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.memory.hot_cache import HotCache
from cairn.memory.pages import PageAllocator
from cairn.models.config_reader import ConfigReader
from cairn.models.layers import named_slots
from cairn.models.loader import build_model

GOLDENS = Path(__file__).parent / "goldens"

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}

TINY_OLMO3: dict[str, Any] = {
    **TINY,
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 11,
}

TINY_LLAMA: dict[str, Any] = {**TINY, "architectures": ["LlamaForCausalLM"]}

TINY_EXPERTS: dict[str, Any] = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}

TINY_LATENT: dict[str, Any] = {
    **TINY,
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}

TINY_DSA: dict[str, Any] = {
    **TINY_LATENT,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 24,
    "indexer_types": ["full", "shared", "full"],
}

TINY_HILS: dict[str, Any] = {
    **TINY,
    "architectures": ["HiLSForCausalLM"],
    "model_type": "qwen_hils",
    "num_attention_heads": 4,
    "use_sliding_window": True,
    "sliding_window": 40,
    "chunk_size": 16,
    "hils_topk": 3,
    "full_attn_interleave": 1,
    "enable_lmk_q_proj": True,
    "lmk_q_lora_dim": 6,
    "apply_hils_rope": True,
    "enable_inrange_rope": True,
    "rope_context_length": 64,
    "rope_period_multiplier": 2.0,
}


def write_model(folder: Path, config: dict[str, Any], seed: int = 0, impl: str = "cairn") -> Path:
    """A model folder with random weights in which every parameter matters."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ConfigReader(config, "test"), torch.float32, torch.device("cpu"), impl=impl)
    slots = named_slots(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, slot in slots.items():
        noise = torch.randn(slot.shape, generator=generator)
        if slot.is_norm:
            tensors[name] = 1 + 0.25 * noise
        elif len(slot.shape) == 1:
            tensors[name] = 0.1 * noise
        elif name == "model.embed_tokens.weight":
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise / slot.shape[1] ** 0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Fill a tensor of any type. Rows of int8 have no NaN, but their scales become NaN."""
    tensor.view(torch.uint8).fill_(0xFF)


def poison_free_memory(
    engine: Engine, when: Callable[[Callable[[], None]], object] = lambda poison: poison()
) -> None:
    """NaN in every slot nobody owns, now and whenever a page is freed; in landmarks too, and in
    host memory. `when` says when freed memory may be written to."""
    pool, cache = engine.runner.stepper.pool, engine.scheduler.cache
    landmarks = getattr(engine.runner.stepper.backend, "_landmarks", None)
    by_page_id: list[torch.Tensor] = []  # of sparse layers
    sparse_group = -1
    if landmarks is not None:
        sparse_group = pool.ids_of[landmarks.shape.layers[0]]
        of_units = [*landmarks.vectors.values(), *landmarks.biases.values()]
        by_page_id += [own.unflatten(0, (-1, landmarks.shape.units)) for own in of_units]
    if engine.runner.tier is not None:
        sparse_group = engine.runner.tier.page_group
        by_page_id += engine.runner.tier._host.tensors()
    for tensor in (*pool.tensors(), *by_page_id):
        fill_with_nan(tensor)
    for g, allocator in enumerate(cache.allocators):
        random.Random(g).shuffle(allocator._free)  # pages lie anywhere

        def poison(page: int, group: int) -> None:
            for tensor in pool._by_group[group]:
                fill_with_nan(tensor[page])
            if group == sparse_group:
                for tensor in by_page_id:
                    fill_with_nan(tensor[page])

        def freed(page: int, group: int = g) -> None:
            when(partial(poison, page, group))

        watch_frees(allocator, freed)


def watch_frees(allocator: PageAllocator, freed: Callable[[int], object]) -> None:
    """Call `freed` with each page that becomes free, after the cache's own records. Replaces an
    earlier `freed`."""
    before = allocator._on_free
    allocator._on_free = _Watch(before.own if isinstance(before, _Watch) else before, freed)


class _Watch:
    def __init__(self, own: Callable[[int], object] | None, freed: Callable[[int], object]) -> None:
        self.own = own
        self._freed = freed

    def __call__(self, page: int) -> None:
        if self.own is not None:
            self.own(page)
        self._freed(page)


def held_slices(hot: HotCache) -> list[tuple[int, int, int, int]]:
    """(kv head, slot, slice, generation) of every slot of a hot cache that is in use."""
    return [
        (head, slot, tag & (2**32 - 1), tag >> 32)
        for head, tags in enumerate(hot.tags.tolist())
        for slot, tag in enumerate(tags)
        if tag != -1
    ]


def stale_slices(tier: HiSparseCoordinator, generation: Sequence[int]) -> list[str]:
    """Hot slots whose bytes differ from the slice that their tag names."""
    problems = []
    for layer, hot in tier._hot.items():
        held = [
            (head, slot, number)
            for head, slot, number, life in held_slices(hot)
            if generation[number // tier._per_page] == life  # no lookup can match another one
        ]
        if not held:
            continue
        heads, slots, numbers = torch.tensor(held).T
        for part, host, device in tier._tensors(layer):
            there = part.by_head(host, tier._per_page)[numbers, :, heads]
            here = part.by_head(device, tier._per_page)[tier._first_hot + slots, :, heads]
            # Bytes: those of a scale may be NaN in 8 bits.
            bytes_there, bytes_here = (
                own.contiguous().view(torch.uint8) for own in (there, here.cpu())
            )
            wrong = (bytes_there != bytes_here).flatten(1).any(1).nonzero()[:, 0].tolist()
            problems += [f"slot {held[i][1]} of layer {layer} is not {held[i][2]}" for i in wrong]
    return problems


def tokens_of(length: int, seed: int = 0, vocab: int = 61) -> list[int]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def byte_tokenizer() -> FastTokenizer:
    """Every byte is a token, so that characters are cut and stop strings cross tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def exit_code(arguments: list[str]) -> int | str | None:
    """The exit code of `cairn` with these arguments. argparse ends the process by itself."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code
