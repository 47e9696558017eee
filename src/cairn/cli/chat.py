"""`cairn chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.markup import escape

from cairn.cli.terminal import WordWrap, line_reader
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError
from cairn.llm import LLM
from cairn.outputs import Generation

_HELP = """\
/reset   start a new conversation
/stats   what the last answer took, and the state of the KV cache
/trace   which pages the last answer was read from (with sparse attention)
/help    this list
/exit    leave (Ctrl-D does too; Ctrl-C stops an answer)
Up and Down recall earlier lines, Ctrl-R searches them."""

_TRACED_PAGES = 8


class Chat:
    """A conversation with its history. The prefix cache makes each turn cost only what is new."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        read: Callable[[str], str] | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._llm = llm
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._system)
        self._read = read or line_reader()
        self._console = Console(file=out or sys.stdout, highlight=False)
        self._last: Generation | None = None

    def run(self) -> int:
        self._say(f"[dim]{escape(self._llm.config.model)}. /help lists the commands.[/dim]")
        while True:
            try:
                line = self._read("> ").strip()
            except EOFError:
                self._say("")
                return 0
            except KeyboardInterrupt:
                self._say("[dim]Ctrl-D or /exit to leave.[/dim]")
                continue
            if line == "/exit":
                return 0
            if line.startswith("/"):
                self._say(self._command(line))
            elif line:
                self._answer(line)

    def _command(self, line: str) -> str:
        commands = {"/reset": self._reset, "/stats": self._stats, "/trace": self._trace}
        if line == "/help":
            return _HELP
        if line in commands:
            return commands[line]()
        return f"[red]No such command: {escape(line)}.[/red] /help lists them."

    def _reset(self) -> str:
        self._messages, self._last = list(self._system), None
        return "[dim]A new conversation.[/dim]"

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._last = None
        trace = self._llm.engine.can_trace
        try:
            stream = self._llm.stream_chat(self._messages, self._params, trace=trace)
        except RequestError as error:
            self._messages.pop()
            self._say(f"[red]{escape(str(error))}[/red]")
            return
        said, wrap = "", WordWrap(lambda: self._console.width)
        with stream:
            try:
                for chunk in stream:
                    said += chunk.text
                    text = _printable(chunk.text)
                    self._write(wrap.push(text) if self._console.is_terminal else text)
                    self._last = chunk.result or self._last
            except KeyboardInterrupt:
                self._write(wrap.finish())
                self._say("\n[dim]stopped[/dim]", end="")
        self._write(wrap.finish())
        self._say("")
        self._messages.append({"role": "assistant", "content": said})

    def _stats(self) -> str:
        if self._last is None:
            return "[dim]No answer yet.[/dim]"
        usage, times = self._last.usage, self._last.timings
        first = times.first_token or 0.0
        rate = max(0, usage.completion_tokens - 1) / max(times.total - first, 1e-9)
        lines = [
            f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} of them cached; "
            f"answer {usage.completion_tokens} tokens, {self._last.finish_reason}",
            f"first token after {first * 1e3:.0f} ms, then {rate:.1f} tokens/s",
        ]
        for group in self._llm.engine.usage():
            used = f"{group.owned} in use, {group.cached} cached, {group.free} free"
            lines.append(f"pages ({group.name}): {used} of {group.total}")
        return "\n".join(lines)

    def _trace(self) -> str:
        if not self._llm.engine.can_trace:
            return "[dim]Attention is dense; --attention-backend hsa selects pages.[/dim]"
        if self._last is None or self._last.trace is None:
            return "[dim]No answer yet.[/dim]"
        trace = self._last.trace
        shares = trace.page_weights()
        if not shares:
            return "[dim]Everything was within the window; no page was selected.[/dim]"
        lines = [f"{len(shares)} of {len(trace.pages)} pages were read, the most in front:"]
        for page, share in sorted(shares.items(), key=lambda item: -item[1])[:_TRACED_PAGES]:
            text = " ".join(_printable(trace.pages[page].text or "").split())
            lines.append(f"{100 * share:5.1f} %  page {page:<5d} {escape(text[:60])}")
        return "\n".join(lines)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _say(self, text: str, end: str = "\n") -> None:
        self._console.print(text, end=end, soft_wrap=True)


def _printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())
