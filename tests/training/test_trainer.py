"""Phases run, runs resume where they stopped, and short training learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cairn import LLM
from training.checkpoint import load_state
from training.cli import main
from training.curriculum import CURRICULUM, Phase, Shape, for_full_attention, shrunk
from training.curves import read_log
from training.errors import UsageError
from training.model_config import Architecture, ModelConfig
from training.optimizers import orthogonal
from training.samples import Kind
from training.tasks import Mixture, World
from training.trainer import Options, Trainer

TINY = ModelConfig(width=32, layers=2, heads=2, kv_heads=1, ffn=32, calibration=4)
Worlds = tuple[World, World]


def trainer(
    out: Path, phases: list[Phase], tokenizer: Tokenizer, worlds: Worlds, **options: object
) -> Trainer:
    config = replace(TINY, architecture=options.pop("architecture", "hils"))  # type: ignore[arg-type]
    settings = Options(out, log_every=1, check_every=1000, check_samples=2, **options)  # type: ignore[arg-type]
    return Trainer(config, phases, settings, tokenizer, *worlds)


@pytest.mark.parametrize("architecture", ["hils", pytest.param("full", marks=pytest.mark.slow)])
def test_every_phase_takes_a_step(
    architecture: Architecture, tokenizer: Tokenizer, worlds: Worlds, tmp_path: Path
) -> None:
    phases = [shrunk(phase, steps=2, batch=2, chunks=8) for phase in CURRICULUM]
    if architecture == "full":
        phases = [for_full_attention(phase) for phase in phases]
    assert trainer(tmp_path, phases, tokenizer, worlds, architecture=architecture).run()
    records = read_log(tmp_path / "log.jsonl")
    assert [r["phase"] for r in records if "held/known" in r] == [p.name for p in CURRICULUM]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    with LLM(tmp_path / "model", device="cpu", dtype="float32", kv_cache_gib=0.05) as llm:
        text = llm.generate("Question: What is the access code of Mira?\nAnswer:", max_tokens=4)
        assert len(text.token_ids) <= 4


def test_a_resumed_run_is_the_uninterrupted_run(
    tokenizer: Tokenizer, worlds: Worlds, tmp_path: Path
) -> None:
    phases = [shrunk(phase, steps=3, batch=2, chunks=4) for phase in CURRICULUM[1:3]]
    assert trainer(tmp_path / "whole", phases, tokenizer, worlds).run()
    # No time at all: each run takes one step, saves and stops.
    runs = 0
    while not trainer(tmp_path / "parts", phases, tokenizer, worlds, minutes=0.0).run():
        runs += 1
    assert runs >= 4
    whole, parts = (
        load_state(tmp_path / name / "state.pt", torch.device("cpu")) for name in ("whole", "parts")
    )
    assert (whole["phase"], whole["step"], whole["total"]) == (2, 0, 6)
    assert (parts["phase"], parts["step"], parts["total"]) == (2, 0, 6)
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=0)


@pytest.mark.slow
def test_rivals_compete_in_the_last_phase(
    tokenizer: Tokenizer, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every other turn of the shapes, also of a run that goes on; never where it is checked."""
    phase = shrunk(CURRICULUM[-1], steps=8, batch=2, chunks=16)
    assert phase.mixture.at_start > 0
    update, seen = Trainer._update, []

    def spy(self: Trainer, *arguments: Any) -> None:
        update(self, *arguments)
        seen.append(self.model.rivals_ahead is not None)

    monkeypatch.setattr(Trainer, "_update", spy)
    whole = trainer(tmp_path / "whole", [phase], tokenizer, worlds)
    assert whole.run() and whole.model.rivals_ahead is None
    while not trainer(tmp_path / "parts", [phase], tokenizer, worlds, minutes=0.0).run():
        pass
    assert seen == 2 * [False, False, True, True] * 2
    parts = load_state(tmp_path / "parts/state.pt", torch.device("cpu"))["model"]
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=0)


def test_a_phase_ends_when_its_goal_is_reached(
    tokenizer: Tokenizer, worlds: Worlds, tmp_path: Path
) -> None:
    phase = replace(shrunk(CURRICULUM[0], steps=50, batch=1, chunks=2), goal=0.0)
    settings = Options(tmp_path, check_every=2, check_samples=8)
    run = Trainer(TINY, [phase], settings, tokenizer, *worlds)
    assert run.run()
    assert read_log(tmp_path / "log.jsonl")[-1]["step"] == 2


def test_learning_rates() -> None:
    phase = replace(CURRICULUM[0], steps=1000, warmup=100, lr=1e-3, final_lr=0.0)
    assert phase.lr_at(0) == pytest.approx(1e-5)
    assert phase.lr_at(99) == pytest.approx(1e-3 * 0.901)
    assert phase.lr_at(1000) == 0.0


def test_a_few_steps_lower_the_loss(tokenizer: Tokenizer, worlds: Worlds, tmp_path: Path) -> None:
    phase = Phase(
        "copy", (Shape(1, 16),), 40, 64, 8, Mixture(text=1.0, facts=0.0), lr=1e-2, warmup=5
    )
    assert trainer(tmp_path, [phase], tokenizer, worlds).run()
    losses = [r["loss/text"] for r in read_log(tmp_path / "log.jsonl") if "loss/text" in r]
    assert losses[-1] < losses[0] - 1.5


def test_orthogonal_steps() -> None:
    matrices = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(0))
    for x in (matrices, matrices.mT):
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        values = torch.linalg.svdvals(orthogonal(x))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        torch.testing.assert_close(orthogonal(x), left @ right, rtol=0, atol=0.25)


def test_full_attention_twin_sees_the_same_samples() -> None:
    for phase in CURRICULUM:
        twin = for_full_attention(phase)
        assert (twin.shapes, twin.steps, twin.mixture) == (phase.shapes, phase.steps, phase.mixture)
        assert set(phase.weights) == set(Kind) - {Kind.NONE}
        assert all(twin.rivals_ahead_at(turn) is None for turn in range(16))  # it has no chunks


@pytest.fixture
def same_worlds(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the worlds of all tests: making them takes longer than the rest."""
    monkeypatch.setattr("training.cli.make_worlds", lambda *_: worlds)


def test_the_command(same_worlds: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--width", "32", "--layers", "2", "--heads", "2", "--kv_heads", "1", "--ffn", "32"]
    run = ["train", "--out", str(tmp_path), "--device", "cpu", "--tiny", "1", "1", "4", *sizes]
    assert main(run) == 0
    asked = ["evaluate", "--model", str(tmp_path / "model"), "--device", "cpu"]
    assert main([*asked, "--lengths", "300", "--samples", "2"]) == 0
    out = capsys.readouterr().out
    assert "all phases done" in out and "300 tokens" in out


def test_a_run_begins_with_given_weights(same_worlds: None, tmp_path: Path) -> None:
    sizes = ["--width", "32", "--layers", "2", "--heads", "2", "--kv_heads", "1", "--ffn", "32"]
    common = ["--device", "cpu", "--phases", "long", "--tiny", "1", "1", "4", *sizes]
    assert main(["train", "--out", str(tmp_path / "a"), *common]) == 0
    first = ["--weights", str(tmp_path / "a/model"), "--seed", "1", "--lr", "1e-12"]
    assert main(["train", "--out", str(tmp_path / "b"), *common, *first]) == 0
    before, after = (load_file(tmp_path / run / "model/model.safetensors") for run in "ab")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_and_states_that_do_not_fit_are_refused(
    tokenizer: Tokenizer,
    worlds: Worlds,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    phases = [shrunk(CURRICULUM[1], steps=1, batch=1, chunks=4)]
    assert trainer(tmp_path / "run", phases, tokenizer, worlds).run()
    model = tmp_path / "run/model"
    for out, weights, config, why in (
        ("run", model, TINY, "state.pt exists already"),
        ("new", tmp_path, TINY, "no config.json"),
        ("new", model, replace(TINY, ffn=48), "ffn is 32, asked for is 48"),
        ("new", model, replace(TINY, chunk=32), "chunk is 64, asked for is 32"),
    ):
        options = Options(tmp_path / out, weights=weights)
        with pytest.raises(UsageError, match=why):
            Trainer(config, phases, options, tokenizer, *worlds)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="is of phases window, not of near"):
        trainer(tmp_path / "run", [CURRICULUM[0]], tokenizer, worlds)
    assert main(["train", "--out", str(tmp_path / "new"), "--phases", "near,lnog"]) == 2
    assert "--phases has lnog; there are: near" in capsys.readouterr().err
