"""What share of a run the scheduler takes when a thousand short requests wait.

python benchmarks/scheduler.py [MODEL] [--load-format dummy]
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from cairn import LLM


def main() -> None:
    arguments = [a for a in sys.argv[1:] if a != "--load-format" and a != "dummy"]
    options: dict[str, Any] = {"load_format": "dummy"} if "dummy" in sys.argv else {}
    draw = random.Random(0)
    with LLM(arguments[0] if arguments else None, device="cpu", **options) as llm:
        vocab = llm.engine.spec.vocab_size
        prompts = [[draw.randrange(vocab) for _ in range(draw.randint(8, 32))] for _ in range(1000)]
        begin = time.perf_counter()
        llm.generate(prompts, max_tokens=16, ignore_eos=True)
        seconds = time.perf_counter() - begin
        stats = llm.engine.stats
        share = 100 * stats.scheduler_seconds / seconds
        print(
            f"1000 requests, {stats.steps} steps, {seconds:.1f} s: "
            f"scheduler {stats.scheduler_seconds:.2f} s, {share:.1f} %"
        )


if __name__ == "__main__":
    main()
