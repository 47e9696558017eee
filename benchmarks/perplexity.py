"""Perplexity of a text, or of several pieces of it, to compare ways of attending and caches.

python benchmarks/perplexity.py TEXT --attention-backend hsa --hsa-topk 16 --hsa-prefill sparse
python benchmarks/perplexity.py TEXT --pieces 7 --dtype bfloat16 --kv-cache-dtype fp8

The text is a prompt, and ordinary models read those densely unless they are told otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from cairn import LLM
from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pieces", type=int, default=1)
    add_flags(parser, EngineConfig)
    arguments = parser.parse_args()
    with LLM(**collect(arguments, EngineConfig)) as llm:
        if llm.tokenizer is None:
            parser.error("the model has no tokenizer")
        ids = llm.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        losses = []
        for begin in range(0, arguments.pieces * arguments.tokens, arguments.tokens):
            piece = ids[begin : begin + arguments.tokens]
            if len(piece) < 2:
                parser.error(f"the text has {len(ids)} tokens; lower --pieces")
            scores = llm.logprobs(piece)[:-1].gather(1, torch.tensor(piece[1:])[:, None])
            losses.append(-scores.mean())
            print(f"{len(piece)} tokens, perplexity {float(losses[-1].exp()):.3f}")
    if len(losses) > 1:
        print(f"all pieces, perplexity {float(torch.stack(losses).mean().exp()):.3f}")


if __name__ == "__main__":
    main()
