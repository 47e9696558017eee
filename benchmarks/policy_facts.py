"""Facts that page-selection policies keep, for many questions in one batch and without the engine.

    python benchmarks/policy_facts.py --texts 50 --length 4096 --device cuda

The texts are those of `cairn eval needle --task multiquery --depths 0,25,50,75,100`: they hold five
facts. The one at 100 % is not asked for, because the window covers it. All prompts have the same
length. A plain Llama in float32 reads them densely, once. Then it answers every question with each
policy: landmarks, scores and selection are Cairn's own (`cairn.sparsity`), the attention is masked.
The weights are read from the GGUF file of the default model. The settings are those of the table in
docs/quality.md, which has two more rows.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.eval.haystack import Prose, read_text
from cairn.eval.needle import is_right, kept
from cairn.eval.prompts import Frame, build_prompts, choose_style
from cairn.eval.tasks import TASKS, NameMaker
from cairn.models.gguf_file import GGUFFile
from cairn.sparsity.policy import Landmark, PolicyShape
from cairn.sparsity.registry import make_policy
from cairn.sparsity.selection import select
from cairn.text.load import load_tokenizer

DEPTHS = (1.0, 0.75, 0.5, 0.25, 0.0)
STEPS = 22  # tokens of an answer
SETTINGS = (
    # policy, page size, window, share of the rows that is read, first layers that are dense
    ("spread", 8, 128, 0.25, 0),
    ("spread", 16, 128, 0.25, 0),
    ("spread", 16, 128, 0.25, 2),
    ("quest", 8, 128, 0.25, 0),
    ("quest", 16, 128, 0.25, 0),
    ("quest", 16, 128, 0.25, 2),
    ("quest", 64, 128, 0.25, 0),
    ("quest", 64, 512, 0.25, 0),
    ("mean", 16, 128, 0.25, 0),
    ("streaming", 16, 1008, 0.25, 0),
)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Llama:
    """Reads rows into KV tensors [sequences, kv_heads, rows, dim], one pair for each layer."""

    def __init__(self, path: Path, device: str) -> None:
        file = GGUFFile(path)
        config = file.config()
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self._epsilon: float = config["rms_norm_eps"]
        self._weights = {
            name: (own if isinstance(own, torch.Tensor) else own.dense()).float().to(device)
            for _, name, own in file.tensors()
        }
        self._embedding = self._weights["model.embed_tokens.weight"]
        self.dim = self._embedding.shape[1] // self.heads
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self._angles = theta ** (-torch.arange(0, self.dim, 2, device=device).float() / self.dim)

    def __call__(
        self, ids: torch.Tensor, start: int, kv: Sequence[torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """The most likely next token [sequences] after ids [sequences, rows] at row `start`."""
        x = self._embedding[ids]
        place = torch.arange(start, start + ids.shape[1], device=ids.device)
        for layer in range(self.layers):
            own = partial(self._linear, f"model.layers.{layer}.")
            rows = self._norm(x, f"model.layers.{layer}.input_layernorm")
            query, key, value = (
                torch.unflatten(own(f"self_attn.{name}_proj", rows), -1, (-1, self.dim))
                for name in "qkv"
            )
            query, key, value = (part.transpose(1, 2) for part in (query, key, value))
            kv[layer][:, : self.kv_heads, start : start + ids.shape[1]] = self._rotate(key, place)
            kv[layer][:, self.kv_heads :, start : start + ids.shape[1]] = value
            keys, values = kv[layer][:, :, : start + ids.shape[1]].chunk(2, 1)
            out = attend(layer, self._rotate(query, place), keys, values)
            x = x + own("self_attn.o_proj", out.transpose(1, 2).flatten(2))
            rows = self._norm(x, f"model.layers.{layer}.post_attention_layernorm")
            gate, up = own("mlp.gate_proj", rows), own("mlp.up_proj", rows)
            x = x + own("mlp.down_proj", F.silu(gate) * up)
        head = self._weights.get("lm_head.weight", self._embedding)
        return (self._norm(x[:, -1], "model.norm") @ head.T).argmax(-1)

    def _linear(self, prefix: str, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weights[f"{prefix}{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon)
        return x * scale * self._weights[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        angles = place[:, None] * self._angles
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def dense(
    layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    rows, past = query.shape[2], keys.shape[2]
    if rows == past:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)
    mask = torch.ones(rows, past, dtype=torch.bool, device=query.device).tril(past - rows)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


class Sparse:
    """Attention of decode rows to the window and to the pages that a policy selects."""

    def __init__(
        self, model: Llama, policy: str, page: int, window: int, share: float, first: int, rows: int
    ) -> None:
        shape = PolicyShape(model.heads, model.kv_heads, model.dim, model.dim**-0.5)
        self._policy, self._shape = make_policy(policy, shape), shape
        self._page, self._window, self._dense = page, window, first
        share = (share * model.layers - first) / (model.layers - first)
        self._topk = 1
        if not self._policy.sinks_only:
            self._topk = max(1, int((share * rows - window) / page))
        self._landmarks: dict[tuple[int, int], torch.Tensor] = {}
        self.read: list[float] = []

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        if layer < self._dense:
            self.read.append(1.0)
            return dense(layer, query, keys, values)
        seqs, kv_heads, past, dim = keys.shape
        rows = query[:, :, 0]  # [sequences, heads, dim]
        scores = torch.einsum("skgd,skpd->skgp", torch.unflatten(rows, 1, (kv_heads, -1)), keys)
        scores = scores.flatten(1, 2) * self._shape.scale  # [sequences, heads, past]
        pages = max(0, (past - self._window) // self._page)
        whole = pages * self._page
        if (layer, pages) not in self._landmarks:
            cut = keys[:, :, :whole].reshape(seqs, kv_heads, pages, self._page, dim)
            vectors = self._policy.landmark(cut.permute(0, 2, 3, 1, 4).flatten(0, 1), None).vectors
            self._landmarks[layer, pages] = torch.unflatten(vectors, 0, (seqs, pages))
        landmarks = self._landmarks[layer, pages]
        mapped = self._policy.map_query(rows)[:, None]

        def score(begin: int, end: int) -> torch.Tensor:
            return self._policy.score(mapped, Landmark(landmarks[:, begin:end], None))[:, 0]

        index, _ = select(
            score,
            torch.full((seqs,), pages, device=keys.device),
            pages,
            scores[..., whole:].logsumexp(-1),
            kv_heads=kv_heads,
            topk=self._topk,
            strategy=self._policy.strategy,
            sinks=1,
        )
        read = torch.zeros(seqs, kv_heads, pages, dtype=torch.bool, device=keys.device)
        read = read.scatter(-1, index, True).repeat_interleave(self._page, -1)
        read = F.pad(read, (0, past - whole), value=True)
        self.read.append(read.float().mean().item())
        hidden = ~read.repeat_interleave(scores.shape[1] // kv_heads, 1)
        shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out = torch.einsum("skgp,skpd->skgd", torch.unflatten(shares, 1, (kv_heads, -1)), values)
        return out.flatten(1, 2)[:, :, None]


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of tokens that two prompts begin with alike."""
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


def _name(setting: tuple[str, int, int, float, int] | None) -> str:
    if setting is None:
        return "dense"
    policy, page, window, _, first = setting
    return f"{policy}, pages of {page}, window {window}, {first} dense layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=50)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", type=int, nargs="*", default=range(len(SETTINGS)))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    source = locate(EngineConfig(model="smollm2"))
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    (path,) = (Path.home() / ".cache/cairn/models/smollm2").glob("*.gguf")
    model, device, length = Llama(path, arguments.device), arguments.device, arguments.length
    frame = Frame(tokenizer, choose_style(tokenizer, "auto"))
    prose = Prose(read_text(None), frame.encode)
    texts = []
    for sample in range(arguments.texts):
        rng = random.Random(f"0 multiquery {length} {sample}")
        names = NameMaker(rng, prose.words, lambda word: len(frame.encode(word)))
        cases = TASKS["multiquery"](rng, names, DEPTHS, 8)
        queries = [case.query for case in cases]
        prompts = build_prompts(frame, prose, queries, length, rng.randrange(2**32))
        pairs = zip(prompts, cases, strict=True)
        texts.append([(own.tokens, case.answer) for own, case in pairs if case.depth < 1])
    each = len(texts[0])
    shared = min(_shared(own[0][0], ids) for own in texts for ids, _ in own[1:])
    asked = [question for own in texts for question in own]
    size = (len(asked), 2 * model.kv_heads, length + STEPS, model.dim)
    kv = [torch.zeros(size, device=device) for _ in range(model.layers)]
    print(f"{len(asked)} questions, {time.perf_counter() - begin:.1f} s to load", flush=True)
    with torch.inference_mode():
        for i, own in enumerate(texts):
            rows = [layer[i * each : i * each + 1] for layer in kv]
            model(torch.tensor([own[0][0][:shared]], device=device), 0, rows, dense)
        for layer in kv:
            by_text = torch.unflatten(layer, 0, (-1, each))
            by_text[:, 1:, :, :shared] = by_text[:, :1, :, :shared]
        tails = torch.tensor([ids[shared:] for ids, _ in asked], device=device)
        first = model(tails, shared, kv, dense)
        print(f"{time.perf_counter() - begin:.1f} s to read the prompts", flush=True)
        base: list[bool] = []
        for setting in (None, *(SETTINGS[i] for i in arguments.settings)):
            start = time.perf_counter()
            sparse = None if setting is None else Sparse(model, *setting, length)
            token, said = first, []
            for step in range(STEPS):
                said.append(token)
                token = model(token[:, None], length + step, kv, sparse or dense)
            answers = [tokenizer.decode(ids) for ids in torch.stack(said, 1).tolist()]
            rights = [
                is_right(answer, right) for answer, (_, right) in zip(answers, asked, strict=True)
            ]
            base = base or rights
            interval = kept(rights, base)
            of_dense = "-"
            if interval is not None:
                of_dense = "{:.0%} of dense ({:.0%} to {:.0%})".format(*interval)
            lost, won = (
                sum(was and not now for was, now in zip(*pair, strict=True))
                for pair in ((base, rights), (rights, base))
            )
            read = 1.0 if sparse is None else sum(sparse.read) / len(sparse.read)
            took = time.perf_counter() - start
            print(
                f"{_name(setting)}: {sum(rights)}/{len(rights)}, {of_dense}, {lost} lost, {won} "
                f"won, reads {read:.1%}, {took:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
