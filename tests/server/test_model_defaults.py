"""What a request leaves out is as the model's generation_config.json has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.cli.main import chat_params as chat
from cairn.engine.locate import sampling_defaults
from cairn.errors import ConfigError
from cairn.models.source import find_model
from cairn.server import wire
from cairn.server.api_error import ApiError
from cairn.server.sampling import chat_params, completion_params
from cairn.server.schema import ChatRequest, CompletionRequest
from tests.server.process import ServerProcess, write_chat_model

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "tiny")


def defaults_of(folder: Path, said: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return sampling_defaults(find_model(str(folder)))


def test_fields_that_shape_the_draw_are_taken(folder: Path) -> None:
    assert defaults_of(folder, QWEN3) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults_of(folder, {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1}) == {
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    greedy = {**QWEN3, "do_sample": False, "repetition_penalty": 1.2}
    assert defaults_of(folder, greedy) == {"repetition_penalty": 1.2}
    (folder / "generation_config.json").unlink()
    assert sampling_defaults(find_model(str(folder))) == {}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": "all"}, "top_p is 'all'"),
        ([], "does not hold a JSON object"),
    ],
)
def test_what_cannot_be_meant_is_refused(folder: Path, said: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        defaults_of(folder, said)
    assert str(folder) in str(refused.value)


def test_a_request_has_the_last_word() -> None:
    message = [{"role": "user", "content": "?"}]
    defaults = {"temperature": 0.6, "top_k": 20}
    chat = chat_params(ChatRequest.model_validate({"messages": message}), 9, defaults)
    assert (chat.temperature, chat.top_k) == (0.6, 20)
    asked = {"messages": message, "temperature": 0, "top_k": -1}
    chat = chat_params(ChatRequest.model_validate(asked), 9, defaults)
    assert (chat.temperature, chat.top_k) == (0, -1)
    body = CompletionRequest.model_validate({"prompt": "?"})
    assert completion_params(body, 9, defaults).top_k == 20
    assert completion_params(body, 9, {}).temperature == 1.0


def test_the_engine_gets_the_parameters_that_were_checked() -> None:
    fields = {"prompt": "?", "stop": ["a", "b"], "logit_bias": {"7": -1.5}, "seed": 2**63 - 1}
    body = CompletionRequest.model_validate({**fields, "stop_token_ids": [3], "logprobs": 2})
    params = completion_params(body, 9, {"top_k": 20})
    message = wire.Submit(number=0, token_ids=[1], params=params)
    decoded = wire.decode_to_engine(wire.encode(message))
    assert isinstance(decoded, wire.Submit) and decoded.params == params
    assert decoded.params.bias == ((7, -1.5),) and decoded.params.stop_strings == ("a", "b")
    with pytest.raises(ApiError, match="top_p is 0") as refused:
        completion_params(body.model_copy(update={"top_p": 0}), 9, {})
    assert refused.value.param == "top_p"


def test_so_has_the_user_of_a_chat() -> None:
    without = chat({}, {})
    assert (without.temperature, without.top_p, without.max_tokens) == (0.7, 0.9, 512)
    partly = chat({"top_k": 20}, {})
    assert (partly.temperature, partly.top_p, partly.top_k) == (1.0, 1.0, 20)
    told = chat({"temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "min_tokens": 200})
    assert (told.temperature, told.top_k, told.min_tokens) == (0.0, 20, 200)


def test_the_server_answers_as_the_model_would_have_it(folder: Path, tmp_path: Path) -> None:
    defaults_of(folder, {"do_sample": True, "temperature": 0.9, "top_k": 1})
    with ServerProcess(folder, tmp_path / "log") as server:

        def answer(**fields: Any) -> str:
            body = {"prompt": "Where is", "max_tokens": 24, **fields}
            said = server.post("/v1/completions", json=body).json()
            return str(said["choices"][0]["text"])

        assert answer() == answer(temperature=0)
        assert answer(top_k=-1, seed=1) != answer()
