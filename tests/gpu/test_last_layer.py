"""The last layer of a prompt computes only the rows whose tokens are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cairn import LLM
from cairn.attention.batch import to_device
from cairn.engine.inputs import StepInputs
from cairn.models import decoder

pytestmark = pytest.mark.gpu
_SHARED: dict[str, Any] = {
    **{"load_format": "dummy", "device": "cuda", "dtype": "bfloat16"},
    **{"kv_cache_gib": 1, "max_running_requests": 4, "disable_cuda_graph": True},
}
_ENGINES: dict[str, dict[str, Any]] = {
    "dense": {"model": "qwen3-0.6b", "context_length": 4096},
    "hsa": {"model": "qwen3-0.6b", "context_length": 4096, "attention_backend": "hsa"},
    "hils": {"model": "hils-345m", "context_length": 4096},
}


@pytest.fixture(params=_ENGINES, scope="module")
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**_SHARED, **_ENGINES[request.param]) as own:
        yield own


@torch.inference_mode()
def test_logits_are_those_of_all_rows(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of a prompt: nobody reads the first one's outputs, and one row of the second."""
    runner, stepper = llm.engine.runner, llm.engine.runner.stepper
    page = runner._choices.geometry.page_size
    found = []
    for cut in (1, 10**9):
        monkeypatch.setattr(decoder, "CUT_ROWS", cut)
        table = np.arange(1, 17)[None] + (0 if cut == 1 else 16)
        for new, total, sampled in ((8 * page, 8 * page, 0), (300, 8 * page + 300, 1)):
            host = StepInputs.made_up(page, [new], [total], [table] * len(runner.tables.pages))
            inputs = host.send(stepper.device, stepper.reads_generations)
            with stepper.launching(inputs.batch, None):
                metadata = stepper.backend.prepare(inputs.batch)
                wanted = to_device(host.sampled_rows[:sampled], stepper.device)
                logits = stepper.forward(inputs, metadata, wanted)
            assert len(logits) == sampled
        found.append(logits.float())
    torch.testing.assert_close(found[0], found[1], atol=0.05, rtol=0.05)
    assert found[0].std() > 0.01
