"""Fields that vLLM, SGLang and their clients send, and those that nobody knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess, write_chat_model

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model whose template has thoughts; several names, any name, no unknown fields."""
    folder = write_chat_model(tmp_path_factory.mktemp("thinker") / "thinker")
    (folder / "chat_template.jinja").write_text(THINKING)
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    flags = ("--served-model-name=one,two", "--any-model-name", "--strict-fields")
    with ServerProcess(folder, log, *flags) as running:
        yield running


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    return server.post(path, json=body)


def ask(server: ServerProcess, **body: Any) -> dict[str, Any]:
    """A chat's whole answer."""
    given = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **body}
    answer = post(server, CHAT, **given)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def complete(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = post(server, COMPLETE, **{"prompt": "One", "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(server: ServerProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, path, stream=True, **body)
    assert answer.status_code == 200, answer.text
    parts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert parts.pop() == "[DONE]"
    return [httpx.Response(200, text=part).json() for part in parts]


def spelled(server: ServerProcess, tokens: list[int]) -> str:
    return str(post(server, "/detokenize", tokens=tokens).json()["prompt"])


def written(text: str) -> dict[str, Any]:
    """Fields that make the model say exactly this."""
    return {"guided_grammar": f"start: {json.dumps(text)}", "max_tokens": 200}


# -- fields that are not known ----------------------------------------------------------------


def test_unknown_fields_are_named(server: ServerProcess) -> None:
    message = {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}
    call = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
    history = [
        message,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "3"},
        {"role": "ipython", "content": [{"type": "text", "text": "y", "citations": None}]},
    ]
    headers = {"X-Request-ID": "unknown-1"}
    body = {"messages": history, "max_tokens": 2, "surprise": 1, "stream": True}
    answer = server.post(CHAT, json=body, headers=headers)
    assert answer.status_code == 200
    names = [
        "surprise",
        "messages[0].cache_control",
        "messages[1].tool_calls[0].index",
        "messages[3].content[0].citations",
    ]
    assert answer.headers["x-cairn-ignored-fields"] == ", ".join(names)
    assert server.logged("unknown-1")["ignored"] == names
    assert "x-cairn-ignored-fields" not in post(server, COMPLETE, prompt="x").headers


def test_unknown_fields_are_refused_if_told_so(thinker: ServerProcess) -> None:
    refused = post(thinker, COMPLETE, prompt="x", surprise=1)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "surprise"
    assert "--strict-fields" in refused.json()["error"]["message"]


def test_fields_that_are_known_and_not_supported(server: ServerProcess) -> None:
    for name, value in (("bad_words", ["x"]), ("stop_regex", "a+"), ("chat_template", "{{ x }}")):
        refused = post(server, COMPLETE, prompt="x", **{name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        assert post(server, COMPLETE, prompt="x", **{name: None}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content is 5; must be text or a list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ({"messages": "x"}, "messages is 'x'; must be a list"),
        ({"messages": []}, "messages needs at least 1 entries"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": ["x"] * 17},
         "stop has more than 16 entries"),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
         "temperature is 'hot'; must be a number"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 0}, "n is 0; must be at least 1"),
        ({"messages": [{"role": "user", "content": "x"}], "stream": None, "top_p": 7},
         "top_p is 7; must be at most 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type is 'image_url'; this server reads text only; leave the part "
         "out"),
        ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
         "response_format has a type other than 'text', 'json_object', 'json_schema'"),
    ],
)  # fmt: skip
def test_errors_are_sentences(server: ServerProcess, body: dict[str, Any], said: str) -> None:
    refused = post(server, CHAT, **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == said


# -- names ------------------------------------------------------------------------------------


def test_several_names_and_any_name(thinker: ServerProcess) -> None:
    models = thinker.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["one", "two"]
    assert complete(thinker)["model"] == "one"
    for name in ("two", "gpt-4o"):
        assert complete(thinker, model=name)["model"] == name


# -- prompts ----------------------------------------------------------------------------------


def test_echo_with_scores(server: ServerProcess) -> None:
    body: dict[str, Any] = {"prompt": "One", "max_tokens": 2, "logprobs": 1, "echo": True}
    body |= {"temperature": 1.8, "seed": 3}
    (choice,) = complete(server, **body)["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"][:3] == ["O", "n", "e"] and len(scores["tokens"]) == 5
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    lengths = [len(token) for token in scores["tokens"]]
    assert scores["text_offset"] == [sum(lengths[:i]) for i in range(5)]
    for place in range(1, 5):
        top, token = scores["top_logprobs"][place], scores["tokens"][place]
        assert top[token] == scores["token_logprobs"][place]
        assert len(top) in (1, 2)
    chunks = [chunk["choices"][0] for chunk in events(server, COMPLETE, **body)]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[0]["text"].startswith("One")
    for name, whole in scores.items():
        assert [each for chunk in chunks for each in chunk["logprobs"][name]] == whole


def test_only_the_prompt(server: ServerProcess) -> None:
    answer = complete(server, max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "One" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["O", "n", "e"]
    assert answer["usage"]["completion_tokens"] == 0
    refused = post(server, COMPLETE, prompt="x", max_tokens=0)
    assert refused.status_code == 400 and "echo" in refused.json()["error"]["message"]


def test_prompt_logprobs(server: ServerProcess) -> None:
    (choice,) = complete(server, prompt_logprobs=2, echo=True, logprobs=2)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 2
    values = [scores[server.token(letter)] for scores, letter in zip(rest, "ne", strict=True)]
    assert [value["logprob"] for value in values] == choice["logprobs"]["token_logprobs"][1:3]
    assert [value["decoded_token"] for value in values] == ["n", "e"]
    assert {entry["rank"] for entry in rest[0].values()} >= {1, 2}
    chat = ask(server, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert ask(server)["prompt_logprobs"] is None
    assert post(server, COMPLETE, prompt="x", prompt_logprobs=1, stream=True).status_code == 400


def test_token_ids_and_truncation(server: ServerProcess) -> None:
    body = {"prompt": list(range(8)), "return_token_ids": True, "ignore_eos": True}
    body |= {"temperature": 1, "seed": 1}
    for side, kept in (("left", [4, 5, 6, 7]), ("right", [0, 1, 2, 3]), (None, [4, 5, 6, 7])):
        given = {**body, "truncate_prompt_tokens": 4, "truncation_side": side}
        (choice,) = complete(server, **given)["choices"]
        assert choice["prompt_token_ids"] == kept
        assert len(choice["token_ids"]) == 4
    streamed = [chunk["choices"][0] for chunk in events(server, COMPLETE, max_tokens=4, **given)]
    assert streamed[0]["prompt_token_ids"] == kept
    assert [i for chunk in streamed[1:] for i in chunk["token_ids"]] == choice["token_ids"]
    long = complete(server, prompt="x" * 5000, truncate_prompt_tokens=-1)
    assert long["usage"]["prompt_tokens"] == 4096 - 4
    (plain,) = complete(server)["choices"]
    assert plain["token_ids"] is None and plain["prompt_token_ids"] is None
    named = ask(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entries = named["choices"][0]["logprobs"]["content"]
    assert all(re.fullmatch(r"token_id:\d+", entry["token"]) for entry in entries)


def test_continued_messages(server: ServerProcess, thinker: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Once up"}]
    for body, text in (
        ({}, "<user>Go<assistant>Once up<assistant>"),
        ({"add_generation_prompt": False}, "<user>Go<assistant>Once up"),
        ({"continue_final_message": True}, "<user>Go<assistant>Once up"),
    ):
        found = post(server, "/tokenize", messages=messages, **body).json()
        assert spelled(server, found["tokens"]) == text
    answer = ask(server, messages=messages, continue_final_message=True, echo=True)
    assert answer["choices"][0]["message"]["content"].startswith("Once up")
    assert answer["usage"]["prompt_tokens"] == len("<user>Go<assistant>Once up")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert post(server, CHAT, messages=messages, **both).status_code == 400


# -- sampling and the end ---------------------------------------------------------------------


def test_values_that_ask_for_nothing(server: ServerProcess) -> None:
    answer = complete(server, seed=-1, top_k=0, temperature=2.5)
    assert answer["usage"]["completion_tokens"] > 0
    same = {"seed": -5, "temperature": 1, "max_tokens": 12}
    one, other = (complete(server, **same)["choices"][0]["text"] for _ in range(2))
    assert one == other


def test_what_ended_an_answer(server: ServerProcess) -> None:
    bias = {"logit_bias": {server.token("a"): 100}}
    (by_text,) = complete(server, **bias, stop=["b", "aa"])["choices"]
    assert (by_text["text"], by_text["finish_reason"]) == ("", "stop")
    assert by_text["matched_stop"] == by_text["stop_reason"] == "aa"
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        (kept,) = complete(server, **bias, stop="aa", **{name: True})["choices"]
        assert kept["text"] == "aa"
    (by_token,) = complete(server, **bias, stop_token_ids=[int(server.token("a"))])["choices"]
    assert by_token["matched_stop"] == by_token["stop_reason"] == int(server.token("a"))
    (by_length,) = complete(server, **bias)["choices"]
    assert by_length["matched_stop"] is None and by_length["finish_reason"] == "length"
    (by_end,) = complete(server, logit_bias={"255": 100})["choices"]
    assert by_end["matched_stop"] == 255 and by_end["stop_reason"] is None


def test_usage_with_every_chunk(server: ServerProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "One", "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
    chunks = events(server, COMPLETE, stream_options=options, **body)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    messages = [{"role": "user", "content": "x"}]
    chat = {"messages": messages, "max_tokens": 3, "ignore_eos": True, "logprobs": True}
    told = events(server, CHAT, stream_options=options, **chat)
    assert [chunk["usage"]["completion_tokens"] for chunk in told] == [0, 1, 2, 3, 3]
    without = events(server, COMPLETE, stream_options={"continuous_usage_stats": True}, **body)
    assert all("usage" not in chunk for chunk in without)


# -- bound answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", 'gr"een']}}, 'red|gr"een'),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"regex": r"^[0-9]{2}/[ab]$"}}, "[0-9]{2}/[ab]"),
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"regex": "[0-4]-[5-9]"}, "[0-4]-[5-9]"),
        ({"ebnf": 'root ::= "Hello" | "Hi"'}, "Hello|Hi"),
        ({"guided_grammar": 'start: "a" "b"?'}, "ab?"),
        ({"structured_outputs": {"json": {"enum": [1, 22]}}}, "1|22"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"json_schema": {"const": "x"}}, '"x"'),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "n", "schema": {"const": 7}}}}, "7"),
    ],
)  # fmt: skip
def test_bound_answers(server: ServerProcess, body: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        body |= {"temperature": 1, "seed": seed}
        (chat,) = ask(server, **body)["choices"]
        assert re.fullmatch(pattern, chat["message"]["content"])
        (completion,) = complete(server, max_tokens=8, **body)["choices"]
        assert re.fullmatch(pattern, completion["text"])


def test_bounds_that_cannot_be_followed(server: ServerProcess) -> None:
    for name, body in (
        ("regex", {"regex": "("}),
        ("ebnf", {"ebnf": "root ::= nothing"}),
        ("guided_json", {"guided_json": "no json"}),
        ("guided_json", {"guided_json": {}, "regex": "x"}),
        ("structured_outputs", {"structured_outputs": {"regex": "x", "choice": ["y"]}}),
    ):
        refused = post(server, COMPLETE, prompt="x", **body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == name


# -- thoughts ---------------------------------------------------------------------------------


def test_thoughts_are_told_apart(thinker: ServerProcess) -> None:
    said = written("<think>\nLet me see.\n</think>\n\nYes.")
    (choice,) = ask(thinker, **said)["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Let me see." and message["content"] == "Yes."
    messages = [{"role": "user", "content": "x"}]
    for more, sizes in (({}, 5), ({"stream_reasoning": False}, 1)):
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in events(thinker, CHAT, messages=messages, **said, **more)
        ]
        thoughts = [d["reasoning_content"] for d in deltas if "reasoning_content" in d]
        assert "".join(thoughts) == "Let me see."
        assert len(thoughts) >= sizes and (sizes > 1 or len(thoughts) == 1)
        assert "".join(d.get("content") or "" for d in deltas) == "Yes."
    (left_out,) = ask(thinker, include_reasoning=False, **said)["choices"]
    assert left_out["message"]["reasoning_content"] is None
    (together,) = ask(thinker, separate_reasoning=False, **said)["choices"]
    assert together["message"]["content"].startswith("<think>")


def test_a_bound_answer_may_follow_thoughts(thinker: ServerProcess) -> None:
    # Of thoughts only the beginning is certain: random weights do not end them.
    (choice,) = ask(thinker, regex="[0-9]", logit_bias={thinker.token("<"): 100}, max_tokens=20)[
        "choices"
    ]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    (free,) = ask(thinker, regex="[0-9]", enable_thinking=False)["choices"]
    assert re.fullmatch("[0-9]", free["message"]["content"])


def test_switches_of_the_template(server: ServerProcess, thinker: ServerProcess) -> None:
    def length(**body: Any) -> int:
        return int(ask(thinker, max_tokens=1, **body)["usage"]["prompt_tokens"])

    off = length() + len("<think></think>")
    for body in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert length(**body) == off
    assert length(reasoning_effort="low") == length(enable_thinking=True) == length()
    messages = [{"role": "user", "content": "x"}]
    unused = post(
        server,
        CHAT,
        messages=messages,
        max_tokens=1,
        reasoning_effort="low",
        chat_template_kwargs={"colour": 1},
    )
    assert unused.status_code == 200
    ignored = unused.headers["x-cairn-ignored-fields"]
    assert ignored == "chat_template_kwargs.colour, reasoning_effort"
    thought = [{"role": "assistant", "content": "b", "reasoning_content": "a"}, *messages]
    found = post(thinker, "/tokenize", messages=thought).json()
    assert spelled(thinker, found["tokens"]) == "<assistant>ab<user>x<assistant>"


def test_special_tokens_are_shown_if_wanted(server: ServerProcess) -> None:
    assert complete(server, skip_special_tokens=False)["usage"]["completion_tokens"] == 4
