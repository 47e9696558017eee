"""Hit rate of the hot cache on real text. A text is read token by token, as if it were generated,
with all pages before the window only in host memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cairn.bench.collector import release
from cairn.bench.tier_engines import TierBench, drop_copies, reads, totals
from cairn.config import EngineConfig
from cairn.engine.locate import locate
from cairn.engine.sampling_params import SamplingParams
from cairn.eval.haystack import read_text
from cairn.eval.ppl import encode_text
from cairn.llm import LLM
from cairn.models.registry import read_spec

_DEVICE_GIB, _HOST_GIB = 1.0, 0.5  # enough for a text with small models
_COLD_ROWS = 16  # first rows, which find the hot cache empty; not counted


def hits(bench: TierBench) -> Iterator[dict[str, Any]]:
    text = read_text(bench.text)
    for model in bench.text_models:
        spec = read_spec(locate(EngineConfig(model=model)).config)
        own = spec.sparsity  # a trained model brings its own selection
        topks = bench.text_topk if own is None else (own.topk,)
        least = 1.0 if own is None else 2.0
        for topk in topks:
            for hot in sorted({max(least, size) for size in bench.hot_sizes}):
                page_size = bench.page_size if own is None else own.chunk_size
                options: dict[str, Any] = {"page_size": page_size}
                if own is None:  # the text's rows are prompt rows, which must select pages here
                    options |= {"hsa_topk": topk, "hsa_window": bench.window}
                    options["hsa_prefill"] = "sparse"
                tier = {"host_gib": _HOST_GIB, "device_buffer_size": int(hot * topk) * page_size}
                row = {"part": "hits", "model": model, "hot": hot}
                yield row | _read(bench, model, text, options, tier)
                release()


def _read(
    bench: TierBench, model: str, text: str, options: dict[str, Any], tier: dict[str, Any]
) -> dict[str, Any]:
    with LLM(
        model,
        dtype=bench.dtype,
        device=bench.device,
        kv_cache_gib=_DEVICE_GIB,
        context_length=bench.text_tokens + 1,
        max_running_requests=1,
        enable_hisparse=True,
        hisparse_config=json.dumps(tier),
        **options,
    ) as llm:
        ids = encode_text(llm, text, bench.text_tokens)
        frontend, engine = llm.frontend, llm.engine
        cache, scheduler = engine.scheduler.cache, engine.scheduler
        llm.generate(ids[: -bench.text_rows], max_tokens=1, ignore_eos=True)
        while cache.reclaim():
            pass
        # One row per step: the rest of the text runs like generated tokens.
        scheduler.limits = replace(scheduler.limits, chunked_prefill_size=1)
        frontend.submit(frontend.prepare(ids, SamplingParams(max_tokens=1, ignore_eos=True)))
        before, steps = totals(llm), -_COLD_ROWS
        while engine.has_work:
            drop_copies(cache)
            frontend.step()
            steps += 1
            if steps == 0:
                before = totals(llm)
        after = totals(llm)
        pages = cache.geometry.pages(len(ids))
        sparse = engine.sparse
        assert sparse is not None
        return {
            "tokens": len(ids),
            "rows": steps,
            "topk": sparse.topk,
            "selected": round(sparse.topk / pages, 3),
            **reads(before, after, max(1, steps)),
        }
