"""Text to tokens and back, with the Hugging Face `tokenizers` library, and chat templates."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`continue_final_message`: end where the last message does, without an end token.
        `variables`: further ones for the template."""
        mark = ""
        if continue_final_message:
            mark = f"<{secrets.token_hex(16)}>"
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": str(last["content"]) + mark}]
            add_generation_prompt = False
        given = {
            **(variables or {}),
            **self.special_tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = render_template(self.source, given)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        if not mark:
            return text
        begin, found, _ = text.partition(mark)
        if not found:
            raise RequestError(
                "continue_final_message: the chat template leaves out the last message"
            )
        return begin


class Tokenizer:
    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None) -> None:
        self.fast = fast
        self.template = template
        self.is_byte_level = isinstance(fast.decoder, decoders.ByteLevel)
        """The text of several tokens is the texts of each, except for split characters."""
        self._texts: dict[int, str] = {}
        self._hidden: frozenset[int] | None = None  # special tokens; None for all of them

    @property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that have no text, by their spelling."""
        added = self.fast.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def showing(self, special: Collection[str]) -> Tokenizer:
        """The same tokenizer, but these special tokens have their spelling as text."""
        shown = Tokenizer(self.fast, self.template)
        shown._hidden = frozenset(
            number for text, number in self.special_tokens.items() if text not in special
        )
        return shown

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
        text: str
        if self._hidden is None:
            text = self.fast.decode(list(ids), skip_special_tokens=True)
        else:
            shown = [number for number in ids if number not in self._hidden]
            text = self.fast.decode(shown, skip_special_tokens=False)
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
        # The template writes its own special tokens.
        return self.encode(self.render_chat(messages, tools), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The text of a conversation. `options` are those of `ChatTemplate.render`."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template; use generate, or add chat_template.jinja"
            )
        check_messages(messages)
        return self.template.render(messages, tools=tools, **options)


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
