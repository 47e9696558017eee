"""`python -m training`: train, evaluate, make the tokenizer."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer

from training.checkpoint import import_model
from training.curriculum import CURRICULUM, Phase, for_full_attention, shrunk
from training.errors import UsageError
from training.model_config import ModelConfig
from training.names import make_names
from training.phrases import all_phrases
from training.scoring import QUIZ, SINGLE, score
from training.tasks import World
from training.text import DATA, load_corpora, load_tokenizer, read_texts, train_tokenizer
from training.trainer import Options, Trainer

_NAMES = 30_000


def make_worlds(
    tokenizer: Tokenizer, data: Path = DATA, names: int = _NAMES
) -> tuple[World, World]:
    """One world to train in, and one that is held out, with other text and other names."""
    seen, held = load_corpora(tokenizer, data)
    to_train, to_ask = make_names(tokenizer, read_texts(data), names, seed=0)
    return World.of(seen, to_train, tokenizer), World.of(held, to_ask, tokenizer)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    if options.command == "train":
        on_gpu = options.device.startswith("cuda")
        options.compile = on_gpu if options.compile is None else options.compile
        if options.workers is None:
            options.workers = max(1, min(12, (os.cpu_count() or 2) - 2)) if on_gpu else 0
    run = {"train": _train, "evaluate": _evaluate, "tokenizer": _tokenizer}[options.command]
    try:
        return run(options)
    except UsageError as error:
        print(f"training: error: {error}", file=sys.stderr)
        return 2


def _train(options: argparse.Namespace) -> int:
    console = Console()
    phases = _phases(options)
    tokenizer = load_tokenizer(options.data)
    world, held_out = make_worlds(tokenizer, options.data)
    config = ModelConfig(
        architecture=options.architecture,
        vocab_size=tokenizer.get_vocab_size(),
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
    )
    trainer = Trainer(
        config,
        phases,
        Options(
            out=options.out,
            seed=options.seed,
            weights=options.weights,
            minutes=options.minutes,
            device=options.device,
            compile=options.compile,
            workers=options.workers,
        ),
        tokenizer,
        world,
        held_out,
        console,
    )
    count = trainer.model.parameter_count()
    console.print(f"{count:,} parameters, {2 * count / 1e6:.1f} MB in bf16, on {options.device}")
    done = trainer.run()
    console.print("all phases done" if done else "time is up; the same command continues")
    return 0


def _phases(options: argparse.Namespace) -> list[Phase]:
    phases = list(CURRICULUM)
    if options.architecture == "full":
        phases = [for_full_attention(phase) for phase in phases]
    if options.tiny:
        steps, batch, chunks = options.tiny
        phases = [shrunk(phase, steps=steps, batch=batch, chunks=chunks) for phase in phases]
    if options.phases:
        wanted = options.phases.split(",")
        if unknown := set(wanted) - {phase.name for phase in phases}:
            names = ", ".join(phase.name for phase in phases)
            raise UsageError(f"--phases has {', '.join(sorted(unknown))}; there are: {names}")
        phases = [phase for phase in phases if phase.name in wanted]
    if options.lr:
        phases = [replace(phase, lr=options.lr, final_lr=options.lr) for phase in phases]
    return phases


def _evaluate(options: argparse.Namespace) -> int:
    console = Console()
    device = torch.device(options.device)
    model = import_model(options.model, device)
    _, held_out = make_worlds(load_tokenizer(options.model), options.data)
    real = model.config.chunk - 1
    for length in options.lengths:
        for name, mixture in (("single", SINGLE), ("several", QUIZ)):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found = score(
                    model,
                    held_out,
                    length // real * real,
                    samples=options.samples,
                    batch=max(1, min(options.samples, 65536 // length)),
                    seed=options.seed,
                    mixture=mixture,
                )
            console.print(f"{length:>7} tokens, {name:>7}: {found}")
    return 0


def _tokenizer(options: argparse.Namespace) -> int:
    tokenizer = train_tokenizer(read_texts(options.data), all_phrases())
    tokenizer.save(str(options.data / "tokenizer.json"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, or resume the last run")
    train.add_argument("--out", type=Path, required=True, help="folder for everything it writes")
    train.add_argument("--architecture", choices=("hils", "full"), default="hils")
    train.add_argument("--minutes", type=float, default=math.inf, help="stop and save before this")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    train.add_argument("--workers", type=int, default=None, help="processes that make samples")
    train.add_argument("--phases", help="names of phases to run, with commas; default: all")
    train.add_argument(
        "--weights",
        type=Path,
        help="an exported folder of the same sizes to begin with, in a new --out",
    )
    train.add_argument("--lr", type=float, help="instead of the phases' own")
    train.add_argument(
        "--tiny",
        type=int,
        nargs=3,
        metavar=("STEPS", "BATCH", "CHUNKS"),
        help="cap every phase, to try things on a CPU",
    )
    default = ModelConfig()
    for name in ("width", "layers", "heads", "kv_heads", "ffn"):
        train.add_argument(f"--{name}", type=int, default=getattr(default, name))
    evaluate = commands.add_parser("evaluate", help="ask held-out questions at several lengths")
    evaluate.add_argument("--model", type=Path, required=True, help="an exported folder")
    evaluate.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    evaluate.add_argument("--samples", type=int, default=64)
    evaluate.add_argument("--seed", type=int, default=7)
    tokenizer = commands.add_parser("tokenizer", help="make data/tokenizer.json from the texts")
    on_gpu = torch.cuda.is_available()
    for command in (train, evaluate):
        command.add_argument("--device", default="cuda" if on_gpu else "cpu")
    for command in (train, evaluate, tokenizer):
        command.add_argument("--data", type=Path, default=DATA, help="folder of the texts")
    return parser
