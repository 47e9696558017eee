"""Text to tokens and back, with the Hugging Face `tokenizers` library, and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from cairn.errors import LoadError, RequestError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's chat format, rendered in a sandbox: templates come with downloads."""

    source: str
    special_tokens: Mapping[str, str]  # bos_token, eos_token ... as templates name them

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _tojson
        try:
            return environment.from_string(self.source).render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template refuses these messages: {error}") from error


class Tokenizer:
    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None) -> None:
        self.fast = fast
        self.template = template
        self.is_byte_level = isinstance(fast.decoder, decoders.ByteLevel)
        """The text of several tokens is the texts of each, except for split characters."""
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The folder's tokenizer.json; None if it has none."""
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise LoadError(f"{path} cannot be read: {error}") from error
        fast.no_truncation()
        fast.no_padding()
        return cls(fast, _read_template(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from error
        # Of the library's methods, this one releases the GIL.
        (encoding,) = self.fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.fast.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """Text of a single token, cached."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.decode([token])
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template; use generate, or add chat_template.jinja"
            )
        check_messages(messages)
        # The template writes its own special tokens.
        text = self.template.render(messages, tools=tools)
        return self.encode(text, add_special_tokens=False)


def check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] needs a role and a content")
        if not isinstance(message.get("content"), str):
            raise RequestError(f"messages[{index}].content must be a string")


def _read_template(folder: Path) -> ChatTemplate | None:
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.exists():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise LoadError(f"{path} is not valid JSON: {error}") from error
    own_file = folder / "chat_template.jinja"
    source = own_file.read_text(encoding="utf-8") if own_file.exists() else None
    source = source or config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return ChatTemplate(source, special)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
