"""`cairn bench`: how fast, next to transformers on the same weights in the same run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.bench.load import SYNTAX
from cairn.cli_flags import add_flags, collect
from cairn.config import EngineConfig
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.bench.workloads import Workload
    from cairn.llm import LLM

# requests, input length, output length
_DEFAULTS = {
    "latency": (4, 128, 64),
    "offline": (256, 128, 64),
    "rag": (8, 2048, 32),
    "summarize": (1, 4096, 256),
}
_HELP = {
    "latency": "requests one by one: time to first token and between tokens",
    "offline": "many requests at once: throughput",
    "rag": "one corpus, many questions: what the prefix cache saves",
    "summarize": "one long document, one long answer",
}


def add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure speed", allow_abbrev=False)
    kinds = bench.add_subparsers(required=True, metavar="WORKLOAD")
    for kind, text in _HELP.items():
        parser = kinds.add_parser(kind, help=text, allow_abbrev=False)
        requests, input_len, output_len = _DEFAULTS[kind]
        group = parser.add_argument_group("workload")
        if kind != "summarize":
            group.add_argument("--requests", type=int, default=requests, metavar="N")
        # The seeded requests have lengths of their own: there a given one is refused.
        lengths: dict[str, Any] = {"type": int, "default": None, "metavar": "TOKENS"}
        group.add_argument("--input-len", help=f"Default: {input_len}.", **lengths)
        group.add_argument("--output-len", help=f"Default: {output_len}.", **lengths)
        group.add_argument(
            "--repeat", type=int, default=1, metavar="N", help="Runs of each engine, in turn."
        )
        if kind == "offline":
            group.add_argument(
                "--lengths",
                choices=("seeded", "equal", "mixed"),
                default="seeded",
                help="The 256 seeded requests others publish (which have their own lengths), "
                "equal lengths, or lengths up to the given ones.",
            )
        if kind in ("rag", "summarize"):
            group.add_argument(
                "--text", metavar="FILE", help="Text to use; Python's own otherwise."
            )
        group.add_argument(
            "--baseline",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="Run transformers too.",
        )
        group.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
        group.add_argument("--plot", metavar="FILE", help="Draw a PNG.")
        add_flags(parser.add_argument_group("engine"), EngineConfig)
        parser.set_defaults(run=_bench, kind=kind)
    _add_gpu_benches(kinds)
    _add_replay(kinds)
    _add_serve(kinds)
    from cairn.bench.tier_command import add_tier_bench

    add_tier_bench(kinds)


def _add_replay(kinds: Any) -> None:
    replay = kinds.add_parser(
        "replay", help="requests of a recorded trace, at their times", allow_abbrev=False
    )
    group = replay.add_argument_group("workload")
    group.add_argument("--trace", required=True, metavar="FILE", help="In Mooncake's format.")
    group.add_argument("--requests", type=int, default=1000, metavar="N", help="The first N.")
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="2 takes twice as long as it took, 0 has all come at once.",
    )
    group.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    add_flags(replay.add_argument_group("engine"), EngineConfig)
    replay.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    from cairn.bench.collector import settled
    from cairn.bench.replay import read_trace, run
    from cairn.bench.report import show_rows
    from cairn.llm import LLM

    if arguments.requests < 1:
        raise ConfigError("--requests must be at least 1")
    if not 0 <= arguments.time_scale < float("inf"):
        raise ConfigError("--time-scale must be 0 or more")
    trace = read_trace(Path(arguments.trace), arguments.requests)
    options = collect(arguments, EngineConfig)
    with LLM(**options) as llm:
        llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True)  # warm up
        with settled():
            result = run(llm, trace, time_scale=arguments.time_scale)
    show_rows("replay", [{**result, **options}], arguments.output)
    return 0


def _add_serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="load for servers with OpenAI's API: ones it starts, or at any URL",
        description=f"Send workloads to servers, and show how they fare. {SYNTAX}",
        epilog="cairn bench serve --workload 64x1024-6144:100-300 --workload 16x30000:256 "
        '--workload 20,100,500,2000:2+concurrency=1 --workload "4x120000:256 32x512:256" '
        "--workload 16x512:64+prefix=8192 --spawn 'dense=--model qwen3-0.6b --load-format dummy' "
        "--url vllm=http://127.0.0.1:8001/v1",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="SPEC",
        help="What to send; may be repeated, for one after the other.",
    )
    parser.add_argument(
        "--spawn",
        action="append",
        default=[],
        metavar="[LABEL=]FLAGS",
        help="Start `cairn serve` with these flags on a free port; may be repeated. A preset gets "
        "a tokenizer of made-up words, since servers stream text.",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[LABEL=]URL",
        help="A server that runs, such as http://127.0.0.1:8000/v1; may be repeated. It is cold "
        "only if nothing was sent to it before, and has a prefix cached if the same --seed was.",
    )
    parser.add_argument("--api-key", metavar="KEY", help="Sent as a bearer token.")
    parser.add_argument(
        "--model", metavar="NAME", help="Of servers at a --url; by default each server's first."
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=10_001,
        metavar="N",
        help="Token ids are drawn below N. Default: %(default)s.",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of lengths and tokens.")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="Of each request."
    )
    parser.add_argument("--json", metavar="FILE", help="Write everything, each request included.")
    parser.add_argument(
        "--client-speed",
        action="store_true",
        help="Measure this client instead, on canned events of a local server.",
    )
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    from cairn.bench.serve import run

    return run(arguments)


def _add_gpu_benches(kinds: Any) -> None:
    attention = kinds.add_parser(
        "attention", help="every attention backend side by side, on CUDA", allow_abbrev=False
    )
    attention.add_argument("--backends", metavar="A,B", help="Only these.")
    attention.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    attention.set_defaults(run=_attention)
    mix = kinds.add_parser(
        "mix", help="a long prompt beside streams that are being answered", allow_abbrev=False
    )
    group = mix.add_argument_group("workload")
    group.add_argument("--long-tokens", type=int, default=131072, metavar="N")
    group.add_argument("--streams", type=int, default=32, metavar="N")
    group.add_argument("--stream-tokens", type=int, default=1024, metavar="N")
    group.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    add_flags(mix.add_argument_group("engine"), EngineConfig)
    mix.set_defaults(run=_mix)
    hsa = kinds.add_parser(
        "hsa",
        help="sparse against dense attention at long contexts, on CUDA",
        allow_abbrev=False,
    )
    hsa.add_argument(
        "--parts",
        default="decode,batch,prefill,together,7b",
        metavar="A,B",
        help="Of: %(default)s.",
    )
    hsa.add_argument(
        "--lengths",
        default="8192,65536,131072,524288",
        metavar="N,M",
        help="Contexts. Default: %(default)s.",
    )
    hsa.add_argument(
        "--longest-dense-prefill",
        type=int,
        default=131072,
        metavar="N",
        help="The dense twin prefills no more: it takes quadratic time. Default: %(default)s.",
    )
    hsa.add_argument("--profile", action="store_true", help="Show the kernels of each step.")
    hsa.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    hsa.set_defaults(run=_hsa)
    steps = kinds.add_parser(
        "profile", help="where the time of a decode step goes, on CUDA", allow_abbrev=False
    )
    group = steps.add_argument_group("workload")
    group.add_argument("--requests", type=int, default=256, metavar="N")
    group.add_argument("--steps", type=int, default=30, metavar="N")
    group.add_argument("--output", metavar="FILE", help="Write the JSON line to a file too.")
    add_flags(steps.add_argument_group("engine"), EngineConfig)
    steps.set_defaults(run=_profile)


def _attention(arguments: argparse.Namespace) -> int:
    import torch

    from cairn.bench.attention import run
    from cairn.bench.report import show_rows

    if not torch.cuda.is_available():
        raise ConfigError("bench attention compares CUDA kernels, and torch finds no CUDA device")
    names = None if arguments.backends is None else tuple(arguments.backends.split(","))
    show_rows("attention", run(torch.device("cuda"), names), arguments.output)
    return 0


def _hsa(arguments: argparse.Namespace) -> int:
    import torch

    from cairn.bench.hsa import PARTS, run
    from cairn.bench.report import show_rows

    if not torch.cuda.is_available():
        raise ConfigError("bench hsa measures CUDA kernels, and torch finds no CUDA device")
    parts = arguments.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ConfigError(f"--parts has {unknown[0]!r}; choose among {', '.join(PARTS)}")
    try:
        lengths = [int(length) for length in arguments.lengths.split(",")]
    except ValueError:
        raise ConfigError(f"--lengths is {arguments.lengths!r}; write numbers and commas") from None
    rows = []
    for row in run(parts, lengths, arguments.longest_dense_prefill, profile=arguments.profile):
        print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
        rows.append(row)
    show_rows("hsa", rows, arguments.output)
    return 0


def _mix(arguments: argparse.Namespace) -> int:
    from cairn.bench.collector import settled
    from cairn.bench.mix import run
    from cairn.bench.report import show_rows
    from cairn.llm import LLM

    options = collect(arguments, EngineConfig)
    with LLM(**options) as llm, settled():
        result = run(
            llm,
            long_tokens=arguments.long_tokens,
            streams=arguments.streams,
            stream_tokens=arguments.stream_tokens,
        )
    show_rows("mix", [{**result, **options}], arguments.output)
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    from cairn.bench.collector import settled
    from cairn.bench.profile import profile_steps
    from cairn.bench.report import show_rows
    from cairn.bench.workloads import seeded
    from cairn.engine.build import resolve_device
    from cairn.engine.sampling_params import SamplingParams
    from cairn.llm import LLM

    options = collect(arguments, EngineConfig)
    if resolve_device(EngineConfig(**options).device).type != "cuda":
        raise ConfigError("bench profile shows CUDA kernels; it needs a CUDA device")
    with LLM(**options) as llm, settled():
        frontend = llm.frontend
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1000)
        workload = seeded(arguments.requests, llm.engine.spec.vocab_size)
        for prompt in workload.prompts:
            frontend.submit(frontend.prepare(prompt, params))
        while llm.engine.scheduler.num_waiting:
            frontend.step()
        for _ in range(20):
            frontend.step()
        result = profile_steps(llm, arguments.steps)
    show_rows("profile", [{"requests": arguments.requests, **result, **options}], arguments.output)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from cairn.bench.collector import settled
    from cairn.bench.measure import Measurement, TransformersBaseline, measure_cairn
    from cairn.bench.report import make_record, show
    from cairn.engine.build import resolve_device, resolve_dtype
    from cairn.engine.locate import locate
    from cairn.llm import LLM

    if getattr(arguments, "lengths", None) == "seeded":
        for name in ("input_len", "output_len"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect on the seeded requests; "
                    "add --lengths equal or mixed"
                )
    _, input_len, output_len = _DEFAULTS[arguments.kind]
    arguments.input_len = input_len if arguments.input_len is None else arguments.input_len
    arguments.output_len = output_len if arguments.output_len is None else arguments.output_len
    for name in ("requests", "input_len", "output_len", "repeat"):
        if getattr(arguments, name, 1) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("output", "plot"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such folder")
    options = collect(arguments, EngineConfig)
    with LLM(**options) as llm:
        workload = _workload(arguments, llm)
        llm.generate([1, 2, 3], max_tokens=8, ignore_eos=True)  # warm up
        device = resolve_device(llm.config.device)
        baseline = None
        if arguments.baseline:
            source = locate(llm.config)
            dtype = resolve_dtype(llm.config.dtype, source.config, device)
            baseline = TransformersBaseline(source, dtype, device)
            baseline.warm_up()
        runs: list[list[Measurement]] = [[], []]
        with settled():
            for _ in range(arguments.repeat):  # in turn, so that both meet the same machine
                llm.engine.scheduler.cache.tree.clear()  # every run starts cold
                runs[0].append(measure_cairn(llm, workload))
                if baseline is not None:
                    runs[1].append(baseline.measure(workload))
    record = make_record(workload, [each for each in runs if each], options, device.type)
    show(record, arguments.output, arguments.plot)
    return 0


def _workload(arguments: argparse.Namespace, llm: LLM) -> Workload:
    from cairn.bench import workloads

    count = getattr(arguments, "requests", 1)
    given, out = arguments.input_len, arguments.output_len
    vocab = llm.engine.spec.vocab_size
    if arguments.kind == "latency":
        return workloads.latency(count, given, out, vocab)
    if arguments.kind == "offline":
        if arguments.lengths == "seeded":
            if count > workloads.SEEDED_REQUESTS:
                raise ConfigError(f"--requests is {count}; there are 256 seeded requests")
            return workloads.seeded(count, vocab)
        make = workloads.uniform if arguments.lengths == "equal" else workloads.mixed
        return make(count, given, out, vocab)
    if llm.tokenizer is None:
        raise ConfigError(f"bench {arguments.kind} needs a model with a tokenizer")
    text = workloads.read_text(arguments.text)
    if arguments.kind == "rag":
        return workloads.rag(llm.tokenizer, text, given, count, out)
    return workloads.summarize(llm.tokenizer, text, given, out)
