"""Time a long prompt with dense and with sparse attention, in turn, on this machine: of a tiny
model, or of one that you name, with the default options.

python benchmarks/sparse_cpu.py --tokens 32768
python benchmarks/sparse_cpu.py --tokens 3000 --model smollm2
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from cairn import LLM

_MODES: dict[str, dict[str, Any]] = {
    "dense": {"attention_backend": "torch"},
    "hsa": {"attention_backend": "hsa", "hsa_topk": 32, "hsa_prefill": "sparse"},
}

_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1_048_576,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="the default is a tiny one with random weights")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    prompt = [random.Random(0).randrange(256) for _ in range(arguments.tokens)]
    best: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        model = arguments.model or folder
        for _ in range(arguments.repeat):
            for name, toy in _MODES.items():
                options = {"load_format": "dummy", **toy}
                if arguments.model:
                    options = {"attention_backend": toy["attention_backend"]}
                took = measure(model, prompt, arguments.output, options)
                best[name] = min(best.get(name, took), took)
    for name, (first, each) in best.items():
        print(f"{name:6s} prompt {first:7.2f} s   token {each * 1e3:7.2f} ms")
    dense, hsa = best["dense"], best["hsa"]
    print(
        f"hsa is {dense[0] / hsa[0]:.2f}x faster on the prompt, {dense[1] / hsa[1]:.2f}x per token"
    )


def measure(
    model: str, prompt: list[int], output: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Seconds to the first token, and per token after it."""
    shared = {"device": "cpu", "max_running_requests": 1}
    length = len(prompt) + output
    with LLM(model, context_length=length, **shared, **options) as llm:
        begin = time.perf_counter()
        result = llm.generate(prompt, max_tokens=output, ignore_eos=True)
        total = time.perf_counter() - begin
        first = result.timings.first_token or total
    return first, (total - first) / (output - 1)


if __name__ == "__main__":
    main()
