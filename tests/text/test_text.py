from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from cairn.errors import LoadError, RequestError
from cairn.text.detokenizer import Detokenizer
from cairn.text.tokenizer import ChatTemplate, Tokenizer
from tests.helpers import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), None)


@given(text=st.text(max_size=40))
def test_streamed_text_is_the_text(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.push([token]) for token in tokenizer.encode(text)]
    assert all("\ufffd" not in piece for piece in shown) or "\ufffd" in text
    assert "".join(shown) + detokenizer.finish() == tokenizer.decode(tokenizer.encode(text))
    assert detokenizer.text == text


@given(
    prompt=st.lists(st.integers(0, 255), max_size=4),
    ids=st.lists(st.integers(0, 255) | st.sampled_from([195, 169, 240, 159, 97]), max_size=30),
    stops=st.lists(st.text(alphabet="aé\ufffd", min_size=1, max_size=3), max_size=2),
    step=st.integers(1, 3),
)
def test_tokens_decoded_apart_give_the_text_of_tokens_decoded_together(
    prompt: list[int], ids: list[int], stops: list[str], step: int
) -> None:
    fast = byte_tokenizer()
    fast.add_special_tokens(["<end>"])
    end = fast.token_to_id("<end>")
    assert end is not None
    ids = [end if token == 7 else token for token in ids]
    apart, together = Tokenizer(fast, None), Tokenizer(fast, None)
    assert apart.is_byte_level
    together.is_byte_level = False
    one, other = (Detokenizer(each, stops, prompt) for each in (apart, together))
    for begin in range(0, len(ids), step):
        new = ids[begin : begin + step]
        assert one.push(new) == other.push(new)
        assert one.stopped == other.stopped
    assert one.finish() == other.finish()
    assert (one.text, one.stopped) == (other.text, other.stopped)


def test_a_character_cut_in_half_appears_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == ["a", ""]
    assert detokenizer.finish() == "\ufffd"


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    step=st.integers(1, 5),
)
def test_stop_strings_end_the_text_and_never_show(
    tokenizer: Tokenizer, text: str, stops: list[str], step: int
) -> None:
    detokenizer = Detokenizer(tokenizer, stops)
    ids = tokenizer.encode(text)
    shown = ""
    for begin in range(0, len(ids), step):
        shown += detokenizer.push(ids[begin : begin + step])
        assert not any(stop in shown for stop in stops)
        if detokenizer.stopped:
            break
    shown += detokenizer.finish()
    positions = [text.find(stop) for stop in stops if stop in text]
    if positions:
        # The match that completes first wins, and of those in one push the leftmost.
        assert detokenizer.stopped
        assert text.startswith(shown)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text
    assert detokenizer.text == shown


def sentencepiece_like() -> FastTokenizer:
    """Spaces as a mark that decoding strips at the start, bytes for what has no token."""
    vocab = {"▁": 0, "a": 1, "▁a": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return fast


@given(prompt=st.lists(st.integers(0, 258), max_size=6), ids=st.lists(st.integers(0, 258)))
def test_any_ids_of_any_tokenizer_become_text(prompt: list[int], ids: list[int]) -> None:
    """Bytes that are no character, spaces at the start: never an error, nothing lost or doubled."""
    detokenizer = Detokenizer(Tokenizer(sentencepiece_like(), None), (), prompt)
    shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert shown == detokenizer.text
    if all(token < 3 for token in [*prompt, *ids]):
        whole = "".join([" ", "a", " a"][token] for token in ids)
        assert shown == (whole if prompt else whole[1:] if whole[:1] == " " else whole)


def test_a_leading_space_after_the_prompt_is_kept() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), None)
    assert tokenizer.decode([2]) == "a"
    detokenizer = Detokenizer(tokenizer, (), prompt_ids=[1, 1])
    assert detokenizer.push([2]) == " a"


def test_special_tokens_do_not_show() -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "<end>": 1, "b": 2}, unk_token="a"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens(["<end>"])
    detokenizer = Detokenizer(Tokenizer(fast, None))
    assert "".join(detokenizer.push([t]) for t in (0, 1, 2)) + detokenizer.finish() == "ab"


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_chat_template_is_rendered_with_the_models_tokens() -> None:
    template = ChatTemplate(CHATML, {"eos_token": "</s>"})
    assert template.render([{"role": "user", "content": "hi"}]) == "<|user|>hi</s><|assistant|>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__ }}",
        "{% if %}",
        "{% for x in messages.append(1) %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        ([{"content": "x"}], r"messages\[0\] needs a role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
    ],
)
def test_bad_messages_are_named(messages: list[dict[str, object]], named: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), ChatTemplate(CHATML, {"eos_token": ""}))
    with pytest.raises(RequestError, match=named):
        tokenizer.apply_chat_template(messages)


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    bare = Tokenizer.from_folder(tmp_path)
    assert bare is not None and bare.template is None
    with pytest.raises(RequestError, match="no chat template"):
        bare.apply_chat_template([{"role": "user", "content": "hi"}])
    config = {"chat_template": CHATML, "eos_token": {"content": "!"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None and loaded.template is not None
    assert loaded.template.render([{"role": "user", "content": "hi"}]) == "<|user|>hi!<|assistant|>"
    (tmp_path / "chat_template.jinja").write_text("own file")
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None and loaded.template is not None
    assert loaded.template.source == "own file"


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
