"""Scores of prompts: which rows of a step they need, and what becomes of the logits."""

from __future__ import annotations

import numpy as np
import torch

from cairn.engine.inputs import StepInputs
from cairn.engine.logprobs import token_logprobs
from cairn.engine.plan import Advance, StepPlan
from cairn.engine.step_result import StepResult


def scored_rows(plan: StepPlan, host: StepInputs) -> dict[int, np.ndarray]:
    """Rows whose logits are needed to score prompts, by sequence."""
    wanted = {}
    for s, advance in enumerate(plan.advances):
        if advance.prompt_scores in ("top", "whole"):
            token_rows = np.flatnonzero(host.is_token & (host.seq == s))
            if advance.prompt_scores == "top":
                token_rows = token_rows[: len(advance.next_ids)]
            wanted[s] = token_rows
    return wanted


def pooled_rows(plan: StepPlan, host: StepInputs) -> dict[str, np.ndarray]:
    """Rows whose hidden states are needed for embeddings, by request."""
    wanted = {}
    for s, advance in enumerate(plan.advances):
        if advance.prompt_scores == "mean":
            wanted[advance.request_id] = np.flatnonzero(host.is_token & (host.seq == s))
        elif advance.prompt_scores == "last" and advance.stop == advance.prompt_len:
            wanted[advance.request_id] = np.flatnonzero(host.is_token & (host.seq == s))[-1:]
    return wanted


def score_prompt(advance: Advance, logits: torch.Tensor, top: int, result: StepResult) -> None:
    """Add the scores of an advance's prompt tokens, each with the `top` best alternatives."""
    if advance.prompt_scores == "whole":
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        result.distributions[advance.request_id] = wide.log_softmax(-1).float().cpu()
        return
    tokens = torch.tensor(advance.next_ids, dtype=torch.int64, device=logits.device)
    scores = token_logprobs(logits, tokens, [top] * len(tokens))
    result.prompt_logprobs[advance.request_id] = scores
