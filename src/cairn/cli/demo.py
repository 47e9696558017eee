"""`cairn demo needle`: a secret in a long text, the answer, and a map of pages read."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cairn.cli_flags import add_command, check_at_least, flag, flags_of
from cairn.config import EngineConfig
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.outputs import Generation
    from cairn.trace import TracedToken

_MODEL = "cairn-nano"
_ANSWER_TOKENS = 48
_SHADES = "░▒▓█"
_LEVELS = (0.1, 0.3, 0.6)  # shares of attention at which the shade gets darker
_SECRET = (
    flag("secret", None, "By default a random number.", metavar="NUMBER"),
    flag("name", "Mira Kolvane", "Whose secret it is."),
    flag("tokens", 65536, "Of the text."),
    flag("depth", 50.0, "Where in the text, in percent."),
    flag("text", None, "Text to hide it in; public-domain prose otherwise.", metavar="FILE"),
)


def add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="see what the engine does", allow_abbrev=False)
    kinds = demo.add_subparsers(required=True, metavar="WHAT")
    model = flag("model", _MODEL, "As everywhere; the bundled model by default.")
    engine = [model, *flags_of(EngineConfig, skip=("model",))]
    text = "hide a secret in a long text and ask for it"
    add_command(kinds, "needle", text, _needle, {"secret": _SECRET, "engine": engine})


def _needle(arguments: argparse.Namespace) -> int:
    from cairn.cli.start import start
    from cairn.eval.haystack import Prose, need_tokenizer, read_text
    from cairn.eval.prompts import Frame, Query, build_prompts, choose_style
    from cairn.eval.tasks import draw_value, fact, question

    secret = draw_value(random.Random()) if arguments.secret is None else arguments.secret
    secret, name = " ".join(secret.split()), " ".join(arguments.name.split())
    if not secret or not name:
        raise ConfigError("--secret and --name must not be empty")
    if not 0 <= arguments.depth <= 100:
        raise ConfigError(f"--depth is {arguments.depth:g}; it must be between 0 and 100")
    check_at_least(arguments, 1, "tokens")
    if arguments.model == _MODEL and not re.fullmatch(r"\d{4,6}", secret):
        note = f"{_MODEL} has learnt to repeat numbers of 4 to 6 digits; {secret!r} is none"
        print(f"cairn: {note}", file=sys.stderr)
    text = read_text(arguments.text)
    console = Console(highlight=False)
    with start(arguments) as llm:
        tokenizer = need_tokenizer(llm)
        frame = Frame(tokenizer, choose_style(tokenizer, "auto"))
        prose = Prose(text, frame.encode)
        hidden = fact(name, secret)
        query = Query(((arguments.depth / 100, hidden),), question(name), name)
        seed = getattr(arguments, "seed", 0)
        (prompt,) = build_prompts(frame, prose, [query], arguments.tokens, seed)
        first = prompt.starts[0]
        last = first + len(frame.encode(hidden)) - 1
        console.print(f"hidden  {escape(hidden.strip())}")
        console.print(f"where   token {first:,} of {len(prompt.tokens):,}")
        console.print(f"asked   {escape(question(name))}")
        begin = time.perf_counter()
        trace = llm.engine.can_trace
        with console.status("reading"):
            result = llm.generate(prompt.tokens, max_tokens=_ANSWER_TOKENS, trace=trace)
        seconds = time.perf_counter() - begin
        per_page = llm.engine.selected.tokens_per_page
        _show(console, result, secret, range(first // per_page, last // per_page + 1), seconds)
    return 0


def _show(console: Console, result: Generation, secret: str, held: range, seconds: float) -> None:
    """The answer, the time it took, and the pages that were read; `held` hold the secret."""
    said = " ".join((result.text or "").split())
    verdict = "[green]right[/green]" if said_secret(said, secret) else "[red]wrong[/red]"
    console.print(f"answer  [bold]{escape(said)}[/bold]  ({verdict})")
    first = result.timings.first_token or 0.0
    rate = (result.usage.completion_tokens - 1) / max(result.timings.total - first, 1e-9)
    console.print(
        f"time    {seconds:.1f} s: {first:.1f} s to read "
        f"({result.usage.prompt_tokens / max(first, 1e-9):,.0f} tokens/s), then {rate:.0f} tokens/s"
    )
    if result.trace is None:
        console.print(
            "[dim]Attention is dense: every token reads every page. --attention-backend hsa "
            "selects pages and shows which.[/dim]"
        )
        return
    tokens = spelling(result.trace.tokens, secret)
    shares = strongest(tokens)
    count = len(result.trace.pages)
    each = [len(token.page_weights()) for token in tokens]
    console.print(
        f"pages   {len(shares)} of {count} selected by any layer and head for the "
        f"{len(tokens)} tokens of the secret, {sum(each) / len(each):.0f} for one of them"
    )
    share = max((shares[page] for page in held if page in shares), default=None)
    what = "not selected"
    if share is not None:
        what = f"selected; a head gave it {share:.0%} of its attention"
    elif held.start >= count - 2:
        what = "in the window, which is always read"
    console.print(f"secret  in page {' and '.join(map(str, held))}: {what}\n")
    console.print(page_map(count, shares, held, console.width))
    console.print(
        f"[dim]each character is a page: · not selected, {_SHADES} selected, by the most attention "
        "that a head gave it; [/dim][green]green[/green][dim] holds the secret and was selected, "
        "[/dim][red]red[/red][dim] holds it and was not[/dim]",
        soft_wrap=True,
    )


def spelling(tokens: Sequence[TracedToken], secret: str) -> Sequence[TracedToken]:
    """The tokens that spell the secret, or else the first number, or else all of them."""
    said = "".join(token.text or "" for token in tokens)
    found = re.search(re.escape(secret), said) or re.search(r"\d+", said)
    if found is None:
        return tokens
    ends = list(accumulate(len(token.text or "") for token in tokens))
    begin, end = bisect_right(ends, found.start()), bisect_left(ends, found.end())
    return tokens[begin : end + 1]


def strongest(tokens: Sequence[TracedToken]) -> dict[int, float]:
    """The largest share that each selected page has in any token, layer and head."""
    most: dict[int, float] = {}
    for token in tokens:
        for read in token.layers:
            for page, weight in read.shares():
                most[page] = max(most.get(page, 0.0), weight)
    return most


def said_secret(said: str, secret: str) -> bool:
    """Whether the answer is right. A number must be the first one said; words must occur in it."""
    from cairn.eval.needle import is_right

    return is_right(said, secret) if secret.isdecimal() else secret in said


def page_map(count: int, shares: Mapping[int, float], held: Collection[int], width: int) -> Text:
    """One character for each page, in reading order."""
    text = Text()
    for page in range(count):
        if page and page % width == 0:
            text.append("\n")
        sign, style = "·", "dim"
        if page in shares:
            sign, style = _SHADES[bisect_right(_LEVELS, shares[page])], "cyan"
        if page in held:
            style = "bold green" if page in shares else "bold red"
            sign = sign if page in shares else "x"
        text.append(sign, style)
    return text
