"""The commands of `cairn bench` and their flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from cairn.bench.load import SYNTAX
from cairn.bench.tier_options import TierBench
from cairn.cli_flags import OUTPUT, PLOT, TEXT, Flag, add_command, flag, flags_of, list_flag
from cairn.config import EngineConfig

# What it measures; requests, input length and output length by default.
_KINDS = {
    "latency": ("requests one by one: time to first token and between tokens", 4, 128, 64),
    "offline": ("many requests at once: throughput", 256, 128, 64),
    "rag": ("one corpus, many questions: what the prefix cache saves", 8, 2048, 32),
    "summarize": ("one long document, one long answer", 1, 4096, 256),
}
_LENGTHS = (
    "The 256 seeded requests that other engines publish (with lengths of their own), equal "
    "lengths, or lengths up to the given ones."
)
_REPLAY = (
    flag("trace", None, "In Mooncake's format.", required=True, metavar="FILE"),
    flag("requests", 1000, "The first N."),
    flag("time-scale", 1.0, "2 takes twice as long as the recording, 0 sends all at once."),
)
_HSA_PARTS = ("decode", "batch", "prefill", "together", "7b")
_HSA = (
    list_flag("parts", _HSA_PARTS, "What to measure.", str, choices=_HSA_PARTS),
    list_flag("lengths", (8192, 65536, 131072, 524288), "Contexts."),
    flag("longest-dense-prefill", 131072, "Longest prompt of the dense twin: quadratic time."),
    flag("profile", False, "Show the kernels of each step.", action="store_true"),
)
_CPU_ENGINES = ("cairn", "transformers", "llama.cpp")
_CPU = (
    flag("model", "smollm2", "A GGUF file, or the name of one.", metavar="NAME"),
    flag("threads", None, "Of each engine; by default one for each core.", type=int, metavar="N"),
    list_flag("engines", _CPU_ENGINES, "Which to measure.", str, choices=_CPU_ENGINES),
    flag("repeat", 5, "Runs of each engine, in turn; medians are shown."),
    flag("scale", 1.0, "Makes prompts and answers shorter or longer."),
)
_MIX = (flag("long-tokens", 131072), flag("streams", 32), flag("stream-tokens", 1024))
_PROFILE = (flag("requests", 256), flag("steps", 30))
_ATTENTION = (
    flag("backends", None, "Only these.", metavar="A,B"),
    flag("cases", "", "Only cases with this in their name, such as MLA.", metavar="TEXT"),
)
_MOE_PARTS = ("layer", "serve")
_DSA_PARTS = ("layer", "prefill", "step", "tier")
_DSA = (
    flag("model", "dsv32-slice", "A preset with an index.", metavar="NAME"),
    flag("device", "auto", "Where to run."),
    list_flag("parts", ("layer",), "What to measure.", str, choices=_DSA_PARTS),
    list_flag("lengths", (8192, 32768), "Contexts."),
    list_flag("batches", (1, 8), "Numbers of sequences."),
    flag("new-rows", 1, "layer: new rows of each sequence."),
    flag("contexts", 4, "tier: contexts that the device has memory for."),
    list_flag(
        "changed",
        (0.0, 0.05, 0.134, 0.3),
        "tier: shares of the selected rows that change with every token.",
        float,
        low=0,
        high=1,
    ),
    flag(
        "topk", None, "layer, prefill: rows that a query reads; by default the preset's.", type=int
    ),
    flag(
        "kv-cache-dtype",
        "auto",
        "layer, prefill: type of latent rows and index keys.",
        choices=("auto", "fp8", "int8"),
    ),
)
_MOE = (
    flag("model", "moe-toy", "A preset with experts.", metavar="NAME"),
    flag("device", "auto", "Where to run."),
    list_flag("parts", ("layer",), "Of the model; all but layer on CUDA.", str, choices=_MOE_PARTS),
    list_flag("rows", (1, 8, 64, 512), "Rows of the layer."),
    flag("baseline", True, "Run transformers too.", action=argparse.BooleanOptionalAction),
    flag("quantization", "none", "Of serve.", choices=("none", "fp8")),
)
_ROUNDINGS = ("none", "fp8", "int8", "int4")
_STEP = (
    flag("model", "llama-7b", "A preset.", metavar="NAME"),
    flag("device", "auto", "Where to run."),
    list_flag(
        "quantizations",
        _ROUNDINGS,
        "The first is what others are compared to.",
        str,
        choices=_ROUNDINGS,
    ),
    list_flag("batches", (1, 8, 64), "Numbers of sequences."),
    flag("context", 1024, "Tokens of each sequence before the first step."),
    flag("steps", 64, "That are counted, for each number of sequences."),
)
_FORMS = ("fp8", "fp8-blocks", "AWQ", "GPTQ", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "Q2_K")
_PRODUCTS = (
    list_flag("shapes", (16384, 4096, 6144, 11008), "Outputs and inputs of each matrix."),
    list_flag("rows", (1, 8, 32, 1024), "Rows of a product."),
    list_flag("forms", _FORMS, "Forms of matrices, beside bf16.", str, choices=_FORMS),
)
_SPEC_PARTS = ("quote", "wrong", "prose")
_SPEC = (
    list_flag("parts", _SPEC_PARTS, "What to measure.", str, choices=_SPEC_PARTS),
    list_flag("batches", (8, 64, 128), "prose: requests at once."),
    list_flag("tokens", (2, 4, 6), "prose: tokens to draft before they are checked."),
    flag("context", 7168, "prose: tokens of each prompt."),
    flag("output-len", 64, "prose: tokens to generate on average."),
    flag("repeat", 3, "quote, wrong: runs with drafts and without, in turn."),
    TEXT,
)
_ENGINE = flags_of(EngineConfig)
# What it measures, its flags, and those of the engine if it takes them.
_OTHERS: dict[str, tuple[str, Sequence[Flag], Sequence[Flag]]] = {
    "attention": ("every attention backend side by side, on CUDA", _ATTENTION, ()),
    "cpu": ("beside transformers and llama.cpp on the same GGUF file, on a CPU", _CPU, ()),
    "dsa": ("a layer with an index beside its dense twin", _DSA, ()),
    "hsa": ("sparse against dense attention at long contexts, on CUDA", _HSA, ()),
    "mix": ("a long prompt beside streams that are being answered", _MIX, _ENGINE),
    "moe": ("the experts of one layer, beside transformers, and whole models", _MOE, ()),
    "products": ("products with quantised matrices, on CUDA", _PRODUCTS, ()),
    "profile": ("where the time of a decode step goes, on CUDA", _PROFILE, _ENGINE),
    "replay": ("requests of a recorded trace, at their times", _REPLAY, _ENGINE),
    "step": ("decode steps of a whole model, quantised and not", _STEP, ()),
    "spec": ("what drafted tokens save, and cost where they are wrong", _SPEC, _ENGINE),
    "tier": ("what KV in host memory buys, and what it costs", flags_of(TierBench), ()),
}
_SERVE_HELP = (
    f"Send workloads to servers, and show how they fare. {SYNTAX} A preset that is started gets a "
    "tokenizer of made-up words, since servers stream text. A server at a URL is cold only if "
    "nothing was sent to it before, and has a prefix cached if the same --seed was."
)
_SERVE_EXAMPLE = (
    "cairn bench serve --workload 64x1024-6144:100-300 --workload 16x30000:256 "
    '--workload 20,100,500,2000:2+concurrency=1 --workload "4x120000:256 32x512:256" '
    "--workload 16x512:64+prefix=8192 --spawn 'dense=--model qwen3-0.6b --load-format dummy' "
    "--url vllm=http://127.0.0.1:8001/v1"
)


def _repeated(name: str, metavar: str, text: str) -> Flag:
    return flag(name, [], f"{text} May be repeated.", action="append", metavar=metavar)


_SERVE = (
    _repeated("workload", "SPEC", "What to send; several are sent one after the other."),
    _repeated("spawn", "[LABEL=]FLAGS", "Start `cairn serve` with these flags on a free port."),
    _repeated("url", "[LABEL=]URL", "A running server, such as http://127.0.0.1:8000/v1."),
    flag("api-key", None, "Sent as a bearer token.", metavar="KEY"),
    flag("model", None, "Of servers at a --url; by default each server's first.", metavar="NAME"),
    flag("temperature", 0.0),
    flag("vocab-size", 10_001, "Token ids are drawn below N."),
    flag("seed", 0, "Of lengths and tokens."),
    flag("timeout", 600.0, "Seconds for each request."),
    flag("json", None, "Write everything, each request included.", metavar="FILE"),
    flag("client-speed", False, "Measure this client itself instead.", action="store_true"),
)


def add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed", allow_abbrev=False)
    kinds = bench.add_subparsers(required=True, metavar="WORKLOAD")
    for kind, (text, *defaults) in _KINDS.items():
        groups = {"workload": _workload_flags(kind, *defaults), "engine": _ENGINE}
        parser = add_command(kinds, kind, text, "cairn.bench.measure:command", groups)
        parser.set_defaults(kind=kind, default_lens=defaults[1:])
    for kind, (text, flags, engine) in _OTHERS.items():
        groups = {"workload": [*flags, OUTPUT], "engine": [*engine]}
        add_command(kinds, kind, text, f"cairn.bench.{kind}:command", groups)
    add_command(
        kinds,
        "serve",
        "load for servers with OpenAI's API: ones it starts, or at any URL",
        "cairn.bench.serve:command",
        {"workload": _SERVE},
        description=_SERVE_HELP,
        epilog=_SERVE_EXAMPLE,
    )


def _workload_flags(kind: str, requests: int, input_len: int, output_len: int) -> list[Flag]:
    flags = [
        # No defaults: the seeded requests have lengths of their own and refuse given ones.
        flag("input-len", None, f"Tokens. Default: {input_len}.", type=int, metavar="N"),
        flag("output-len", None, f"Tokens. Default: {output_len}.", type=int, metavar="N"),
        flag("repeat", 1, "Runs of each engine, in turn."),
        flag("baseline", True, "Run transformers too.", action=argparse.BooleanOptionalAction),
        OUTPUT,
        PLOT,
    ]
    if kind != "summarize":
        flags.append(flag("requests", requests))
    if kind == "offline":
        flags.append(flag("lengths", "seeded", _LENGTHS, choices=("seeded", "equal", "mixed")))
    if kind in ("rag", "summarize"):
        flags.append(TEXT)
    return flags
