"""A mixture of experts from outside of the package, against plain torch on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from cairn import LLM
from cairn.errors import ConfigError
from tests.engine.tiered import DENSE, tiered
from tests.helpers import TINY, poison_free_memory, tokens_of, write_model
from tests.parallel.ranks import load as load_ranks

IMPL = "tests.models.toy_moe:build"
PAGE = 16
CONFIG: dict[str, Any] = {
    **TINY,
    "architectures": ["ToyMoeForCausalLM"],
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe"), CONFIG, impl=IMPL)


def load(folder: Path, **options: Any) -> LLM:
    options = {"page_size": PAGE, "dtype": "float64", "device": "cpu", **options}
    llm = LLM(folder, model_impl=IMPL, **options)
    poison_free_memory(llm.engine)
    return llm


def no_model(config: object, factory: object) -> dict[str, str]:
    return {}


class Reference:
    """The whole sequence at once, without a cache."""

    def __init__(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.chosen: set[tuple[int, ...]] = set()
        """Experts that rows chose together."""

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], CONFIG["rms_norm_eps"])

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.product(f"{name}.gate_proj", x)) * self.product(f"{name}.up_proj", x)
        return self.product(f"{name}.down_proj", gated)

    def experts(self, name: str, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in x:
            scores = self.product(f"{name}.router", row).softmax(-1)
            chosen = scores.argsort(descending=True)[: CONFIG["num_experts_per_tok"]].tolist()
            self.chosen.add(tuple(sorted(chosen)))
            total = sum(scores[e] for e in chosen)
            rows.append(
                sum(scores[e] / total * self.mlp(f"{name}.experts.{e}", row) for e in chosen)
            )
        return torch.stack([torch.as_tensor(row) for row in rows])

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        dim = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
        query, key, value = (
            self.product(f"{name}.{part}_proj", x).view(len(x), -1, dim).transpose(0, 1)
            for part in "qkv"
        )
        frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.arange(len(x)).double()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()

        def rotated(heads: torch.Tensor) -> torch.Tensor:
            low, high = heads.chunk(2, -1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

        out = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        return self.product(f"{name}.o_proj", out.transpose(0, 1).flatten(1))

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        for i in range(CONFIG["num_hidden_layers"]):
            name = f"model.layers.{i}"
            x = x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))
            feed_forward = self.mlp if i < CONFIG["num_dense_layers"] else self.experts
            x = x + feed_forward(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        return self.product("lm_head", self.norm("model.norm", x)).log_softmax(-1)

    def generate(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return ids[len(prompt) :]


def test_logits_in_one_piece_and_chunked(folder: Path) -> None:
    ids = tokens_of(75)
    reference = Reference(folder)
    expected = reference.logprobs(ids)
    assert len(reference.chosen) > 3  # rows do choose different experts
    for chunk in (7, 4096):
        with load(folder, chunked_prefill_size=chunk) as llm:
            found = llm.logprobs(ids)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


def test_batches_with_cold_and_warm_prefixes(folder: Path) -> None:
    shared = tokens_of(40)
    prompts = [[*shared, 7, i] for i in range(3, 6)] + [tokens_of(20, seed=5)]
    reference = Reference(folder)
    expected = [reference.generate(prompt, 12) for prompt in prompts]
    with load(folder) as llm:
        for cached in (0, 42 // PAGE * PAGE):
            results = llm.generate(prompts, max_tokens=12, ignore_eos=True)
            assert [result.token_ids for result in results] == expected
            assert results[0].usage.cached_tokens == cached
        llm.engine.scheduler.check()


def test_sparse_attention_with_a_host_tier(folder: Path) -> None:
    prompt = tokens_of(150)
    options: dict[str, Any] = {"model_impl": IMPL, "chunked_prefill_size": 32, **DENSE}
    with load(folder, **DENSE) as llm:
        expected = llm.generate(prompt, max_tokens=20, ignore_eos=True).token_ids
    with tiered(folder, frames=7, **options) as llm:
        assert llm.generate(prompt, max_tokens=20, ignore_eos=True).token_ids == expected
        report = llm.engine.tier()
        assert report is not None and report.totals.misses > 0


def test_two_ranks_share_every_expert(folder: Path) -> None:
    ids = tokens_of(40)
    with load_ranks(folder, 2, model_impl=IMPL, dtype="float64") as llm:
        found = llm.logprobs(ids)
    torch.testing.assert_close(found.double(), Reference(folder).logprobs(ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        ("cairn", "architecture ToyMoeForCausalLM is not supported"),
        ("tests.models.toy_moe:make", "model_impl 'tests.models.toy_moe:make' cannot be imported"),
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("tests.models.test_toy_moe:no_model", "returns dict, which is no cairn.models.interface"),
    ],
)
def test_a_model_that_is_not_found_is_named(folder: Path, impl: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu", model_impl=impl)
