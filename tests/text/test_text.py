from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from cairn.errors import LoadError, RequestError
from cairn.text.detokenizer import Detokenizer
from cairn.text.stop_strings import StopStrings
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
    one, other = (Detokenizer(each, StopStrings(stops), prompt) for each in (apart, together))
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
    detokenizer = Detokenizer(tokenizer, StopStrings(stops))
    ids = tokenizer.encode(text)
    shown = ""
    for begin in range(0, len(ids), step):
        shown += detokenizer.push(ids[begin : begin + step])
        if detokenizer.stopped:
            break
    shown += detokenizer.finish()
    # The string that is complete first ends the text, however it comes; of several, the longest.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert detokenizer.stopped == bool(ends)
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert detokenizer.text == shown


class CountedText(str):
    """A text that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, key: Any) -> str:
        CountedText.looks += 1
        return str.__getitem__(self, key)


def test_the_search_for_stop_strings_is_linear() -> None:
    """Against the worst text for a search that begins again at each character."""
    stops = StopStrings(["a" * 1000 + "b"] * 16)
    state = stops.start()
    for _ in range(20):
        assert stops.find(CountedText("a" * 500), state) is None
    assert CountedText.looks <= 3 * 16 * 20 * 500
    assert stops.find("ab", state) == (1 - 1000, 2)
    assert state == [0] * 16


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
    detokenizer = Detokenizer(Tokenizer(sentencepiece_like(), None), None, prompt)
    shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert shown == detokenizer.text
    if all(token < 3 for token in [*prompt, *ids]):
        whole = "".join([" ", "a", " a"][token] for token in ids)
        assert shown == (whole if prompt else whole[1:] if whole[:1] == " " else whole)


def test_a_leading_space_after_the_prompt_is_kept() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), None)
    assert tokenizer.decode([2]) == "a"
    detokenizer = Detokenizer(tokenizer, prompt_ids=[1, 1])
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


DOUBLING = "{% set ns = namespace(x=[1], s='ab') %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ 'a' * 10**10 }}", "too large"),
        (DOUBLING + "{% set ns.s = ns.s + ns.s %}{% endfor %}", "too large"),
        (DOUBLING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "too large"),
        (DOUBLING + "{% set ns.x = ns.x + ns.x %}{% endfor %}", "too large"),
        (DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}", "too many steps"),
        (DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == [1] }}", "many steps"),
        (DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ [ns.x]|sort }}", "many steps"),
        ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "too large"),
        ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", "too large"),
        ("{{ ''.join(['a' * 10**6] * 10**4) }}", "too large"),
        ("{{ (['a' * 10**6] * 10**4) | join }}", "too large"),
        ("{{ ('a' * 10**7) | list }}", "too large"),
        ("{{ ('%s' * 999) % (['a' * 10**6] * 999) }}", "too large"),
        ("{{ '%99999d' % 1 }}", "wider than 999"),
        ("{{ '%99999d' | format(1) }}", "wider than 999"),
        ("{{ 9 ** (9 ** 9) }}", "4096 bits"),
        ("{{ 'a' | indent(10**9) }}", "indent has a width"),
        ("{{ [1] | batch(10**9, 0) | list }}", "batch has 1000000000 columns"),
        ("{{ 1.5 | round(10**9, 'ceil') }}", "round has a precision"),
        ("{{ [1] | tojson(indent=10**9) }}", "tojson has an indent"),
        ("{{ {({'a': 1} | items | first): 1} }}", "a key of a dict is a tuple"),
        ("{{ 'a'.ljust(10**9) }}", "'ljust' of 'str'"),
        ("{{ '{:1000000000}'.format(1) }}", "'format' of 'str'"),
        ("{{ 'a' | center(10**9) }}", "No filter named 'center'"),
        ("{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for i in range(10**5) if false %}{% endfor %}" * 9, "too many steps"),
        ("{{ range(10**5) | map('string') | map('list') | list }}", "too many steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
         "too many steps"),
        ("{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "recursion|steps"),
        ("{{ 'a' }}" * 50_000, "at most 262144 are read"),
    ],
)  # fmt: skip
def test_a_template_cannot_run_or_grow_without_end(source: str, named: str) -> None:
    with pytest.raises(RequestError, match=f"chat template refuses.*{named}"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_what_templates_use_gives_what_jinja2_gives() -> None:
    source = (
        "{% set ns = namespace(n=0, kept=[]) %}{% for m in messages if m.role != 'tool' %}"
        "{% set ns.n = ns.n + loop.index0 % 2 %}{% set ns.kept = ns.kept + [m] %}"
        "{{ '%s=%s;' % (m.role, m.content | length) ~ loop.last }}{% endfor %}"
        "{% set first, rest = messages[0], messages[1:] %}{{ first.content.split(' ')[-1] }}"
        "{{ rest | map(attribute='role') | unique | sort | join(', ') }}"
        "{{ rest | selectattr('role', 'equalto', 'user') | list | length }}"
        "{% for key, value in first.items() %}{{ key ~ value.replace('e', 'E') }}{% endfor %}"
        "{{ [1, 2.5, none, true, 'x'] }}{{ (1, 2) == [1, 2] }}{{ 'a' in ('a', 'b') }}{{ nothing }}"
        "{{ messages[::-1] | first | tojson }}{{ {'a': {'b': ['é']}} | tojson(indent=2) }}"
        "{{ dict(first, role='x') | items | list }}{{ [3, 1] | sort | reverse | list }}"
        "{{ 'a\nb' | indent(2) }}{{ range(5) | batch(2) | list }}{{ ' x ' | trim | default('y') }}"
        "{% macro hi(name, end='!') %}{{ name }}{{ end }}{{ caller() if caller }}{% endmacro %}"
        "{{ hi('Ann') }}{% call hi('Bob') %}called{% endcall %}{{ 7 // 2 }}{{ 2 ** 5 }}{{ 7 / 2 }}"
        "{{ '%s %d' | format('a', 3) }}{{ '%(x)s' | format(x=1) }}"
    )
    roles = ["system", "user", "assistant", "tool", "user"]
    messages = [{"role": role, "content": f"we are {role}"} for role in roles]
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    # A tuple is a list here, so that it equals one.
    expected = plain.from_string(source.replace("(1, 2) ==", "[1, 2] ==")).render(messages=messages)
    assert ChatTemplate(source, {}).render(messages) == expected


def test_a_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}"
        "{% set text = m.content | trim %}{{ '<' + m.role + '>' + text + '</s>' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 100}] * 5000 + [
        {"role": "user", "content": "y" * 4_000_000}
    ]
    assert len(ChatTemplate(source, {}).render(messages)) == 5000 * 110 + 4_000_010


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


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "\udcff"),
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_broken_files_beside_a_tokenizer_are_named(file: str, content: str, tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(LoadError, match=file):
        Tokenizer.from_folder(tmp_path)


def test_a_list_of_templates_may_hold_anything(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    templates = [3, {"name": ["default"]}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None and loaded.template is not None
    assert loaded.template.source == "yes"


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
