"""Runs the phases within a time limit, and saves a state from which training can resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from training.batches import Batches, stream
from training.checkpoint import export_model, import_model, load_state, save_state
from training.curriculum import Phase
from training.curves import draw
from training.errors import UsageError
from training.loss import Tally, batch_loss
from training.model import Decoder, run_layer
from training.model_config import ModelConfig
from training.optimizers import make_optimizers
from training.scoring import score
from training.tasks import World


@dataclass(frozen=True, slots=True)
class Options:
    out: Path
    seed: int = 0
    weights: Path | None = None
    """An exported model to start from, instead of random weights."""
    minutes: float = math.inf
    device: str = "cpu"
    compile: bool = False
    workers: int = 0
    log_every: int = 25
    check_every: int = 250
    check_samples: int = 128
    reserve_seconds: float = 25.0
    """Seconds kept for the last evaluation, the state and the plots."""

    @property
    def state(self) -> Path:
        return self.out / "state.pt"

    @property
    def log(self) -> Path:
        return self.out / "log.jsonl"


class Trainer:
    def __init__(
        self,
        config: ModelConfig,
        phases: Sequence[Phase],
        options: Options,
        tokenizer: Tokenizer,
        world: World,
        held_out: World,
        console: Console | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._phases, self._options = phases, options
        self._tokenizer, self._world, self._held_out = tokenizer, world, held_out
        self._console = console or Console()
        self._device = torch.device(options.device)
        given = _given_weights(options, config)
        torch.manual_seed(options.seed)
        self.model = Decoder(config).to(self._device)
        self._optimizers = make_optimizers(self.model)
        self._phase = self._step = self._total = 0
        self._seconds = 0.0  # of earlier runs
        self._note = ""
        options.out.mkdir(parents=True, exist_ok=True)
        if options.state.exists():
            self._resume()
        elif given is not None:
            self.model.load_state_dict(given.state_dict())
        if options.compile:
            torch._dynamo.config.recompile_limit = 64  # a few per phase
            self.model.run_layer = torch.compile(run_layer, dynamic=False)

    def run(self) -> bool:
        """True when all phases are done, False when time is up."""
        while self._phase < len(self._phases):
            if not self._run_phase(self._phases[self._phase]):
                self._save()
                return False
            self._phase, self._step = self._phase + 1, 0
            self._save()
        return True

    # -- one phase ---------------------------------------------------------------------------

    def _run_phase(self, phase: Phase) -> bool:
        options, model, device = self._options, self.model, self._device
        model.window, model.top_k, model.recompute = phase.window, phase.top_k, phase.recompute
        batches = Batches(self._world, phase, self._phase, options.seed, model.config.chunk)
        source = stream(batches, self._step, options.workers, device.type == "cuda")
        tally, tokens = Tally(device), 0
        since = time.monotonic()
        with self._bar() as bar:
            task = bar.add_task(phase.name, total=phase.steps, completed=self._step, note="")
            for batch in source:
                self._update(phase, batch.to(device), tally)
                self._step += 1
                self._total += 1
                tokens += batch.tokens.numel()
                bar.advance(task)
                late = self._out_of_time()
                if self._step % options.log_every == 0 or late:
                    record = tally.read()  # waits for the device
                    now = time.monotonic()
                    record["tokens/s"], tokens, since = tokens / (now - since), 0, now
                    self._record(phase, record)
                    self._note = _note(record)
                    bar.update(task, note=self._note)
                if self._step % options.check_every == 0 or late or self._step == phase.steps:
                    reached = self._check(phase)
                    since = time.monotonic()
                    if reached >= phase.goal:
                        break
                if late:
                    return self._step == phase.steps
        return True

    def _update(self, phase: Phase, batch: Any, tally: Tally) -> None:
        turn = self._step // len(phase.shapes)
        self.model.read_all = phase.reads_all_at(turn)
        self.model.rivals_ahead = phase.rivals_ahead_at(turn)
        with self._precision():
            loss = batch_loss(self.model, batch, phase.weights, tally)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = phase.lr_at(self._step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _check(self, phase: Phase) -> float:
        """Share of held-out questions that are answered, at the phase's longest shape."""
        model, options = self.model, self._options
        shape = max(phase.shapes, key=lambda s: s.chunks)
        fast, model.run_layer = model.run_layer, run_layer
        model.read_all, model.rivals_ahead = False, None
        with self._precision():
            found = score(
                model,
                self._held_out,
                shape.tokens(model.config.chunk),
                samples=min(options.check_samples, 8 * shape.batch),
                batch=min(shape.batch, options.check_samples),
                seed=options.seed + 1,
            )
        model.run_layer = fast
        held = {"held/known": found.known, "held/value": found.value, "held/unknown": found.unknown}
        self._record(phase, {k: v for k, v in held.items() if not math.isnan(v)})
        self._console.print(f"[bold]{phase.name}[/] step {self._step}: {found}; {self._note}")
        return min(found.known, found.unknown)

    # -- state -------------------------------------------------------------------------------

    def _save(self) -> None:
        options = self._options
        save_state(
            options.state,
            self.model,
            self._optimizers,
            phases=[phase.name for phase in self._phases],
            phase=self._phase,
            step=self._step,
            total=self._total,
            seconds=self._elapsed(),
        )
        export_model(self.model, self._tokenizer, options.out / "model")
        if options.log.exists():
            draw(options.log, options.out / "curves.png")

    def _resume(self) -> None:
        state = load_state(self._options.state, self._device)
        names = [phase.name for phase in self._phases]
        began_with = state.get("phases", names)
        if began_with != names:
            raise UsageError(
                f"{self._options.state} is of phases {', '.join(began_with)}, not of "
                f"{', '.join(names)}; give the same --phases, or another --out"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._phase, self._step = state["phase"], state["step"]
        self._total, self._seconds = state["total"], state["seconds"]
        self._console.print(f"resumed at phase {self._phase}, step {self._step}")

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._began

    def _out_of_time(self) -> bool:
        used = time.monotonic() - self._began
        return used > 60 * self._options.minutes - self._options.reserve_seconds

    def _record(self, phase: Phase, values: dict[str, float]) -> None:
        where = {
            "phase": phase.name,
            "step": self._step,
            "total": self._total,
            "seconds": round(self._elapsed(), 2),
        }
        rounded = {name: round(value, 5) for name, value in values.items()}
        with self._options.log.open("a") as file:
            file.write(json.dumps(where | rounded) + "\n")

    def _precision(self) -> torch.autocast:
        on_gpu = self._device.type == "cuda"
        return torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            refresh_per_second=1,
        )


def _given_weights(options: Options, config: ModelConfig) -> Decoder | None:
    """Load the weights to start from, if given and if they fit."""
    if options.weights is None:
        return None
    if options.state.exists():
        raise UsageError(
            f"{options.state} exists already, and a run resumes with its own weights; leave out "
            "--weights, or give another --out"
        )
    if not (options.weights / "config.json").exists():
        raise UsageError(f"--weights {options.weights} is no exported model: no config.json")
    given = import_model(options.weights, torch.device(options.device))
    for name, ours in asdict(config).items():
        if (theirs := getattr(given.config, name)) != ours:
            raise UsageError(
                f"--weights {options.weights}: {name} is {theirs}, asked for is {ours}"
            )
    return given


def _note(record: dict[str, float]) -> str:
    parts = [
        f"{name} {record[f'right/{name}']:.2f}"
        for name in ("copy", "form", "first", "rest", "absent", "variable")
        if f"right/{name}" in record
    ]
    return f"{record['tokens/s'] / 1e3:.0f}K tok/s  " + " ".join(parts)
