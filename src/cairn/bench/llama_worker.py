"""llama.cpp under measurement, in a process of its own. See `cpu.py` for what it reads and writes.

It is run as a script and imports nothing of Cairn, which would change how OpenMP's threads wait.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp as lib
import numpy as np

_BATCH = 2048


class Engine:
    """Greedy generation for several sequences at once, over llama.cpp's own calls."""

    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        lib.llama_backend_init()
        lib.llama_log_set(_silent, None)
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = context, _BATCH, sequences
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_BATCH, 0, 1)
        self._sequences = sequences
        self._cached: list[int] = []  # what sequence 0 holds

    def run(self, prompts: list[list[int]], outputs: list[int], keep: bool) -> dict[str, Any]:
        """`keep`: of a single prompt, what the cache still holds is not computed again."""
        shared = 0
        for cached, token in zip(self._cached if keep else (), prompts[0][:-1], strict=False):
            if cached != token:
                break
            shared += 1
        for seq in range(self._sequences):
            lib.llama_memory_seq_rm(self._memory, seq, shared if seq == 0 else 0, -1)
        begin = time.perf_counter()
        newest: dict[int, int] = {}
        first, texts = [], []
        rows = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
            if position >= shared
        ]
        for start in range(0, len(rows), _BATCH):
            self._decode(rows[start : start + _BATCH])
            for row, (_, _, seq, wanted) in enumerate(rows[start : start + _BATCH]):
                if wanted:
                    newest[seq] = self._best(row)
                    first.append(time.perf_counter() - begin)
                    texts.append([newest[seq]])
        lengths = [len(prompt) for prompt in prompts]
        while live := [seq for seq in newest if len(texts[seq]) < outputs[seq]]:
            rows = [(newest[seq], lengths[seq] + len(texts[seq]) - 1, seq, True) for seq in live]
            self._decode(rows)
            for row, seq in enumerate(live):
                newest[seq] = self._best(row)
                texts[seq].append(newest[seq])
        seconds = time.perf_counter() - begin
        self._cached = list(prompts[0])
        lib.llama_memory_seq_rm(self._memory, 0, len(self._cached), -1)
        return {"seconds": seconds, "first": first, "tokens": sum(map(len, texts)), "texts": texts}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, wanted
        if status := lib.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


@lib.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


def main() -> None:
    path, *numbers = sys.argv[1:]
    engine = Engine(path, *map(int, numbers))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
