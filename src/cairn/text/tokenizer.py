"""Text to tokens and back, with the Hugging Face `tokenizers` library, and chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from cairn.errors import CairnError, LoadError, RequestError
from cairn.models.json_file import read_object
from cairn.text.sandbox import render as render_template

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
        given = {
            **self.special_tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_template(self.source, given)
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
        with library_errors(LoadError, f"{path} cannot be read"):
            fast = FastTokenizer.from_file(str(path))
        fast.no_truncation()
        fast.no_padding()
        return cls(fast, _read_template(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from error
        with library_errors(RequestError, "the model's tokenizer fails on this text"):
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


@contextmanager
def library_errors(error: type[CairnError], what: str) -> Iterator[None]:
    """Turns whatever the library raises into `error`. Its panics are not Exceptions."""
    try:
        yield
    except (CairnError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as failure:
        raise error(f"{what}: {failure}") from failure


def check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] needs a role and a content")
        if not isinstance(message.get("content"), str):
            raise RequestError(f"messages[{index}].content must be a string")


def _read_template(folder: Path) -> ChatTemplate | None:
    path = folder / "tokenizer_config.json"
    config = read_object(path, LoadError) if path.exists() else {}
    own_file = folder / "chat_template.jinja"
    try:
        source = own_file.read_text(encoding="utf-8") if own_file.exists() else None
    except (OSError, ValueError) as error:
        raise LoadError(f"{own_file} cannot be read: {error}") from error
    source = source or config.get("chat_template")
    if isinstance(source, list):  # several named templates: the default one
        defaults = [
            entry.get("template")
            for entry in source
            if isinstance(entry, dict) and entry.get("name") == "default"
        ]
        source = defaults[-1] if defaults else None
    if not isinstance(source, str):
        return None
    special = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            special[name] = content
    return ChatTemplate(source, special)
