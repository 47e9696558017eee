"""What routers ask of a worker, and what they write into the requests they forward."""

from __future__ import annotations

import cairn
from tests.server.process import ServerProcess

# sglang-router 0.3.2 adds these, whatever the client sent.
ROUTER_DEFAULTS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
ROUTER_CHAT_DEFAULTS = {
    **ROUTER_DEFAULTS,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


def test_a_router_learns_what_it_needs(server: ServerProcess) -> None:
    engine = server.stats()["engine"]
    models = server.get("/v1/models").json()["data"]
    for path in ("/get_model_info", "/model_info"):
        info = server.get(path).json()
        assert info["served_model_name"] == server.model == models[0]["id"]
        assert info["model_path"].endswith(server.model)
        assert info["is_generation"] is True
        assert info["max_model_len"] == engine["max_tokens"]
    for path in ("/get_server_info", "/server_info"):
        info = server.get(path).json()
        assert info["served_model_name"] == server.model
        assert info["version"] == cairn.__version__
        assert info["status"] == "ok"
        assert info["page_size"] == engine["page_size"]
        assert info["context_length"] == engine["context_length"]
        assert info["tp_size"] == info["dp_size"] == 1
    assert server.get("/health").status_code == 200


def test_requests_as_a_router_forwards_them(server: ServerProcess) -> None:
    prompt = {"prompt": "hello", "max_tokens": 4, **ROUTER_DEFAULTS}
    assert server.post("/v1/completions", json=prompt).status_code == 200
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 4, **ROUTER_CHAT_DEFAULTS}
    assert server.post("/v1/chat/completions", json=chat).status_code == 200


def test_a_value_that_asks_for_something_is_refused(server: ServerProcess) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "return_hidden_states": True}
    answer = server.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "return_hidden_states" and "leave it out" in error["message"]
