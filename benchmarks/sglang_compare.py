"""One checkpoint in SGLang 0.5.15 and in Cairn: time to the first token, and per decode step.

python benchmarks/sglang_compare.py prepare FOLDER      # Qwen3-0.6B's shape, random weights
python benchmarks/sglang_compare.py run sglang-triton FOLDER --output FILE
python benchmarks/sglang_compare.py run sglang-hsa FOLDER --output FILE
python benchmarks/sglang_compare.py run cairn-hsa FOLDER --output FILE
python benchmarks/sglang_compare.py run cairn-dense FOLDER --output FILE
python benchmarks/sglang_compare.py table FILE

sglang-triton is stock SGLang: it is told to load no plug-in, so Cairn may be installed beside it.
sglang-hsa is the same with Cairn's plug-in (docs/sglang.md). cairn-hsa and cairn-dense are Cairn's
own engine, the latter with `auto`, which takes the fastest kernels installed. The sglang-* engines
need an environment with `cairn-llm[sglang]`; everything else runs wherever Cairn does.

Prompts are random ids, answers greedy and streamed. A batch's time to the first token ends when the
last of its requests has one, and a decode step is timed while all of them are decoding. KV takes
43 GiB. `--tiny`, for `prepare` and `run`, is a trial on a CPU, with `torch_native` for `triton`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Moments = list[tuple[float, int]]
"""When a request had how many tokens."""
Prompts = list[list[int]]
Generate = Callable[[Prompts], list[Moments]]

ENGINES = ("sglang-triton", "sglang-hsa", "cairn-hsa", "cairn-dense")
PAGE, BATCH, ATTEMPTS = 64, 8, 3
SKIPPED = 8  # tokens at both ends that are not timed


@dataclass(frozen=True)
class Sizes:
    device: str = "cuda"
    dtype: str = "bfloat16"
    contexts: tuple[int, ...] = (8192, 32768, 65536, 131072)
    batch_context: int = 32768
    output: int = 136
    longest: int = 140_032
    chunk: int = 8192  # what both take by default on a large GPU
    pool: int = 400_000  # tokens of KV in SGLang
    kv_gib: float = 44.0  # the same in Cairn, landmarks included
    topk: int = 32
    window: int = 512

    @property
    def sparse(self) -> dict[str, Any]:
        return {"policy": "quest", "topk": self.topk, "window": self.window}


TINY = Sizes("cpu", "float32", (300, 600), 300, 64, 1024, 128, 4096, 0.003, 2, 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write the checkpoint")
    running = commands.add_parser("run", help="measure an engine; one line of JSON each time")
    running.add_argument("engine", choices=ENGINES)
    for each in (preparing, running):
        each.add_argument("folder", type=Path)
        each.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    running.add_argument("--output", type=Path, help="append the lines to this file")
    commands.add_parser("table", help="the best attempts").add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "table":
        table(arguments.file)
        return
    sizes = TINY if arguments.tiny else Sizes()
    if arguments.command == "prepare":
        prepare(arguments.folder, sizes)
    else:
        run(arguments.engine, arguments.folder, sizes, arguments.output)


def prepare(folder: Path, sizes: Sizes) -> None:
    import torch
    from safetensors.torch import save_file

    from cairn.models.config_reader import ConfigReader
    from cairn.models.layers import named_slots
    from cairn.models.loader import build_model
    from cairn.models.presets import PRESETS

    config = dict(PRESETS["qwen3-0.6b"])
    if sizes is TINY:
        config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "head_dim": 16}
        config |= {"intermediate_size": 96, "vocab_size": 499}
    config |= {"model_type": "qwen3", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
    config |= {"torch_dtype": sizes.dtype, "max_position_embeddings": sizes.longest}
    dtype: torch.dtype = getattr(torch, sizes.dtype)
    model = build_model(ConfigReader(config, "config.json"), dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, slot in named_slots(model).items():
        noise = torch.randn(slot.shape, generator=generator)
        if slot.is_norm:
            noise = 1 + 0.1 * noise
        elif name == "model.embed_tokens.weight":
            # Little against what the layers add, or the last token would repeat itself.
            noise = 0.05 * noise
        else:
            noise = noise / slot.shape[-1] ** 0.5
        tensors[name] = noise.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def run(engine: str, folder: Path, sizes: Sizes, output: Path | None) -> None:
    vocab = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    start = cairn_engine if engine.startswith("cairn") else sglang_engine
    cases = [*((context, 1) for context in sizes.contexts), (sizes.batch_context, BATCH)]
    with start(engine, folder, sizes) as generate:
        # Chunks with a past and without, then a batch: most of what is compiled on the way.
        generate([prompt(5 * sizes.chunk // 2, 0, vocab)])
        generate([prompt(sizes.chunk // 2, seed, vocab) for seed in range(BATCH)])
        for attempt in range(ATTEMPTS):
            for context, batch in cases:
                # All different, so that no prefix is found; the same ones for every engine.
                seed = 100 * batch + 10 * attempt
                prompts = [prompt(context, seed + i, vocab) for i in range(batch)]
                begin = time.perf_counter()
                times = digest(begin, generate(prompts))
                row = {"engine": engine, "context": context, "batch": batch, "attempt": attempt}
                line = json.dumps(row | times)
                print(line, flush=True)
                if output is not None:
                    with output.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


def prompt(length: int, seed: int, vocab: int) -> list[int]:
    draw = random.Random(10_000 * length + seed)
    return [draw.randrange(3, vocab) for _ in range(length)]


def digest(begin: float, requests: list[Moments]) -> dict[str, float]:
    """Steps are those of the request that came last, until the first of all has ended."""
    last = max(requests, key=lambda moments: moments[0][0])
    end = min(moments[-1][0] for moments in requests)
    most = max((count for when, count in last if when <= end), default=0)
    kept = [(when, count) for when, count in last if SKIPPED < count <= most - SKIPPED]
    if len(kept) < 2:
        raise SystemExit("the requests of a batch were hardly decoding at the same time")
    first = last[0][0] - begin
    step = (kept[-1][0] - kept[0][0]) / (kept[-1][1] - kept[0][1])
    return {"first_token_ms": round(1e3 * first, 2), "step_ms": round(1e3 * step, 3)}


@contextmanager
def sglang_engine(name: str, folder: Path, sizes: Sizes) -> Iterator[Generate]:
    # The plug-ins that SGLang may load; none is called "none".
    os.environ["SGLANG_PLUGINS"] = "hsa" if name == "sglang-hsa" else "none"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if sizes.device == "cpu":
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**sglang_options(name, folder, sizes))
    sampling = {"temperature": 0, "max_new_tokens": sizes.output, "ignore_eos": True}

    async def follow(ids: list[int]) -> Moments:
        moments: Moments = []
        stream = await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True)
        async for chunk in stream:
            count = chunk["meta_info"]["completion_tokens"]
            if not moments or count > moments[-1][1]:
                moments.append((time.perf_counter(), count))
        return moments

    async def together(prompts: Prompts) -> list[Moments]:
        return await asyncio.gather(*map(follow, prompts))

    try:
        yield lambda prompts: engine.loop.run_until_complete(together(prompts))
    finally:
        engine.shutdown()


def sglang_options(name: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    options: dict[str, Any] = {"model_path": str(folder), "skip_tokenizer_init": True}
    options |= {"device": sizes.device, "dtype": sizes.dtype, "log_level": "warning"}
    options |= {"context_length": sizes.longest, "chunked_prefill_size": sizes.chunk}
    options |= {"grammar_backend": "none", "sampling_backend": "pytorch"}  # greedy: an argmax
    options |= {"max_total_tokens": sizes.pool, "mem_fraction_static": 0.6}
    # With BATCH the last request would wait until another ends: SGLang 0.5.15 counts the one whose
    # prompt is being cut into chunks twice.
    options |= {"max_running_requests": 2 * BATCH}
    if name == "sglang-hsa":
        options |= {"attention_backend": "hsa", "page_size": PAGE}
        options["json_model_override_args"] = json.dumps({"cairn_hsa": sizes.sparse})
    else:
        options["attention_backend"] = "torch_native" if sizes.device == "cpu" else "triton"
    if sizes.device == "cpu":
        return options | {"disable_cuda_graph": True, "disable_overlap_schedule": True}
    # Decode steps are recorded as graphs; prompts are not, which hsa refuses.
    options |= {"cuda_graph_bs_decode": [1, 2, 4, BATCH], "cuda_graph_backend_prefill": "disabled"}
    return options


@contextmanager
def cairn_engine(name: str, folder: Path, sizes: Sizes) -> Iterator[Generate]:
    from cairn import SamplingParams
    from cairn.config import EngineConfig
    from cairn.frontend import Frontend
    from cairn.outputs import Chunk

    options: dict[str, Any] = {"model": str(folder), "device": sizes.device, "dtype": sizes.dtype}
    options |= {"context_length": sizes.longest, "chunked_prefill_size": sizes.chunk}
    options |= {"kv_cache_gib": sizes.kv_gib, "page_size": PAGE, "max_running_requests": BATCH}
    if name == "cairn-hsa":
        options |= {"attention_backend": "hsa"}
        options |= {f"hsa_{key}": value for key, value in sizes.sparse.items()}
    else:
        options |= {"attention_backend": "auto"}
    frontend = Frontend(EngineConfig(**options))
    params = SamplingParams(temperature=0.0, max_tokens=sizes.output, ignore_eos=True)

    def generate(prompts: Prompts) -> list[Moments]:
        requests: dict[str, Moments] = {}

        def take(chunk: Chunk | Exception) -> None:
            if isinstance(chunk, Exception):
                raise chunk
            moments = requests[chunk.request_id]
            if chunk.token_ids:
                before = moments[-1][1] if moments else 0
                moments.append((time.perf_counter(), before + len(chunk.token_ids)))

        for ids in prompts:
            (request,) = frontend.prepare(ids, params)
            requests[request.id] = []
            frontend.submit([request], take)
        while any(map(frontend.is_open, requests)):
            frontend.step()
        return list(requests.values())

    try:
        yield generate
    finally:
        frontend.close()


def table(file: Path) -> None:
    """Later attempts do not pay for what is compiled on the way."""
    labels = {"first_token_ms": "first token", "step_ms": "decode step"}
    best: dict[tuple[str, int, int], dict[str, float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for what in labels:
            case = best.setdefault((what, row["batch"], row["context"]), {})
            case[row["engine"]] = min(case.get(row["engine"], row[what]), row[what])
    engines = [engine for engine in ENGINES if any(engine in case for case in best.values())]
    print("| ms, batch x context |", " | ".join(engines), "|")
    print("|---" * (len(engines) + 1) + "|")
    for (what, batch, context), case in sorted(best.items()):
        cells = (f"{case[engine]:.2f}" if engine in case else "-" for engine in engines)
        print(f"| {labels[what]}, {batch} x {context} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
