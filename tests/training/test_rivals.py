"""Chunks of other texts that compete in training."""

from __future__ import annotations

import torch

from training.attention import attend, choose, first_window_chunk, landmarks, rival_scores
from training.curriculum import CURRICULUM, Phase
from training.model import Decoder, Layer
from training.model_config import ModelConfig

_TOP_K = 2


def _model() -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=64, width=32, layers=2, heads=4, kv_heads=2, ffn=48)
    model = Decoder(config)
    model.window, model.top_k = 16, _TOP_K
    return model


def _tokens(model: Decoder, batch: int, chunks: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    length = chunks * (model.config.chunk - 1)
    return torch.randint(1, 64, (batch, length), generator=generator)


def test_a_text_alone_has_no_rivals() -> None:
    model = _model()
    tokens = _tokens(model, 1)
    alone = model(tokens)
    model.rivals_ahead = 100.0
    torch.testing.assert_close(model(tokens), alone)


def test_rivals_far_behind_change_nothing() -> None:
    model = _model()
    tokens = _tokens(model, 3)
    without = model(tokens)
    model.rivals_ahead = -1e6
    torch.testing.assert_close(model(tokens), without)


def test_rivals_far_ahead_leave_nothing() -> None:
    """All places and the whole softmax go to them, the window's share too."""
    model = _model()
    tokens = _tokens(model, 2)
    model.rivals_ahead = 1e4
    seen: list[torch.Tensor] = []
    layer = model.model.layers[0]
    assert isinstance(layer, Layer)
    layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens)
    assert seen[0].abs().max() < 1e-6


def test_rival_scores_are_those_of_the_other_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    scoring = torch.randn(2, 3, 5, 4, generator=generator)
    vectors = torch.randn(2, 3, 6, 4, generator=generator)
    entropy = torch.rand(2, 3, 6, generator=generator)
    scores = torch.unflatten(rival_scores(scoring, (vectors, entropy)), -1, (2, 6))
    for text, other in ((0, 1), (1, 0)):
        expected = scoring[text] @ vectors[other].transpose(-1, -2) / 2 + entropy[other][:, None]
        torch.testing.assert_close(scores[text, :, :, other], expected)
        assert (scores[text, :, :, text] < -1e29).all()


def test_rivals_take_places_of_the_text_s_own_chunks() -> None:
    own, theirs = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.5, 0.0])
    scores = torch.cat((own, theirs)).view(1, 1, 1, 5)
    eligible = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    chosen = choose(scores, torch.zeros(1, 1, 1), eligible, 1, _TOP_K)
    assert chosen.flatten().tolist() == [True, False, False, True, False]


def test_what_rivals_displace_is_not_read() -> None:
    """The last row reads one chunk besides its window, and a rival comes out ahead of its own."""
    generator = torch.Generator().manual_seed(0)
    query, scoring, keys, values = torch.randn(4, 2, 1, 32, 8, generator=generator).unbind()
    rows, chunk, window = torch.arange(32), 4, 8
    summary = landmarks(scoring, keys, chunk)
    first = first_window_chunk(rows, window, chunk)
    near_alone = values.clone()
    near_alone[:, :, : int(first[-1]) * chunk] = 0.0

    def last(read: torch.Tensor, ahead: float | None) -> torch.Tensor:
        rivals = None if ahead is None else torch.tensor(ahead)
        own = (query, scoring, keys, read, summary, rows, first, chunk, 1, 1)
        return attend(*own, torch.tensor(False), rivals)[:, :, -1]

    assert (last(values, None) - last(near_alone, None)).abs().max() > 1e-2
    torch.testing.assert_close(last(values, 5.0), last(near_alone, 5.0))
    assert last(values, 5.0).abs().max() > 1e-3  # the window has kept a share


def test_chosen_rivals_are_taught() -> None:
    """The loss of one text alone reaches what the other text is made of."""
    model = _model()
    tokens = _tokens(model, 2)
    tokens[0] = 1  # the second text alone has other words
    tokens[1, tokens[1] == 1] = 2
    only_theirs = 5
    tokens[1, 0] = only_theirs

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(tokens)[0, -20:].square().sum().backward()
        grad = model.model.embed_tokens.weight.grad
        assert grad is not None
        return grad[only_theirs].abs().sum()

    assert gradient() == 0
    model.rivals_ahead = 1.0
    assert gradient() > 0


def test_when_rivals_compete() -> None:
    phase = Phase("p", (), 1, 1, 1, CURRICULUM[0].mixture, open_every=4, rivals_every=2)
    ahead = [phase.rivals_ahead_at(turn) for turn in range(200)]
    assert [value is not None for value in ahead] == [turn % 2 == 1 for turn in range(200)]
    raised = [value for value in ahead if value is not None]
    assert 0 <= min(raised) < 0.05 and 0.95 < max(raised) <= 1
    assert not any(phase.reads_all_at(turn) for turn in range(1, 200, 2))
    assert CURRICULUM[0].rivals_ahead_at(1) is None
