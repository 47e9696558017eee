"""Perplexity of a text, to compare ways of attending.

python benchmarks/perplexity.py TEXT --attention-backend hsa --hsa-topk 16 --hsa-prefill sparse

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
    add_flags(parser, EngineConfig)
    arguments = parser.parse_args()
    with LLM(**collect(arguments, EngineConfig)) as llm:
        if llm.tokenizer is None:
            parser.error("the model has no tokenizer")
        ids = llm.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
        scores = llm.logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    print(f"{len(ids)} tokens, perplexity {float((-scores.mean()).exp()):.3f}")


if __name__ == "__main__":
    main()
