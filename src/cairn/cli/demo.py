"""`cairn demo needle`: a secret in a long text, the answer, and a map of pages read."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from cairn.cli_flags import add_flags
from cairn.config import EngineConfig
from cairn.errors import ConfigError

if TYPE_CHECKING:
    from cairn.outputs import Generation
    from cairn.trace import TracedToken

_MODEL = "cairn-nano"
_ANSWER_TOKENS = 48
_SHADES = "░▒▓█"
_LEVELS = (0.1, 0.3, 0.6)  # shares from which on a page is darker


def add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="see what the engine does", allow_abbrev=False)
    kinds = demo.add_subparsers(required=True, metavar="WHAT")
    needle = kinds.add_parser(
        "needle", help="hide a secret in a long text and ask for it", allow_abbrev=False
    )
    group = needle.add_argument_group("secret")
    group.add_argument("--secret", metavar="NUMBER", help="By default a random number.")
    group.add_argument(
        "--name", default="Mira Kolvane", help="Whose secret it is. Default: %(default)s."
    )
    group.add_argument(
        "--tokens", type=int, default=65536, metavar="N", help="Of the text. Default: %(default)s."
    )
    group.add_argument(
        "--depth", type=float, default=50.0, metavar="PERCENT", help="Default: %(default)g."
    )
    group.add_argument(
        "--text", metavar="FILE", help="Text to hide it in; public-domain prose otherwise."
    )
    engine = needle.add_argument_group("engine")
    engine.add_argument(
        "--model", default=_MODEL, help="As everywhere; the bundled model by default."
    )
    add_flags(engine, EngineConfig, skip=("model",))
    needle.set_defaults(run=_needle)


def _needle(arguments: argparse.Namespace) -> int:
    from cairn.cli.start import start
    from cairn.eval.haystack import Prose, read_text
    from cairn.eval.needle import need_tokenizer
    from cairn.eval.prompts import Frame, Query, build_prompts, choose_style
    from cairn.eval.wording import draw_value, fact, question
    from cairn.llm import LLM

    seed = getattr(arguments, "seed", 0)
    secret = arguments.secret
    if secret is None:
        secret = draw_value(random.Random())
    secret, name = " ".join(secret.split()), " ".join(arguments.name.split())
    if not secret or not name:
        raise ConfigError("--secret and --name must not be empty")
    if not 0 <= arguments.depth <= 100:
        raise ConfigError(f"--depth is {arguments.depth:g}; it must be between 0 and 100")
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens is {arguments.tokens}; it must be at least 1")
    if arguments.model == _MODEL and not re.fullmatch(r"\d{4,6}", secret):
        print(
            f"cairn: {_MODEL} has learnt to repeat numbers of 4 to 6 digits; {secret!r} is none",
            file=sys.stderr,
        )
    text = read_text(arguments.text)
    console = Console(highlight=False)
    with LLM.from_frontend(start(arguments)) as llm:
        tokenizer = need_tokenizer(llm)
        prose = Prose(text, lambda part: tokenizer.encode(part, add_special_tokens=False))
        frame = Frame(tokenizer, choose_style(tokenizer, "auto"))
        hidden = fact(name, secret)
        query = Query(((arguments.depth / 100, hidden),), question(name), name)
        (prompt,) = build_prompts(frame, prose, [query], arguments.tokens, seed)
        first = prompt.starts[0]
        last = first + len(tokenizer.encode(hidden, add_special_tokens=False)) - 1
        console.print(f"hidden  {escape(hidden.strip())}")
        console.print(f"where   token {first:,} of {len(prompt.tokens):,}")
        console.print(f"asked   {escape(question(name))}")
        begin = time.perf_counter()
        with console.status("reading"):
            result = llm.generate(
                prompt.tokens, max_tokens=_ANSWER_TOKENS, trace=llm.engine.can_trace
            )
        seconds = time.perf_counter() - begin
        geometry = llm.engine.scheduler.cache.geometry
        pages = range(first // geometry.tokens_per_page, last // geometry.tokens_per_page + 1)
        _show(console, result, secret, pages, seconds)
    return 0


def _show(console: Console, result: Generation, secret: str, held: range, seconds: float) -> None:
    said = " ".join((result.text or "").split())
    right = said_secret(said, secret)
    verdict = "[green]right[/green]" if right else "[red]wrong[/red]"
    console.print(f"answer  [bold]{escape(said)}[/bold]  ({verdict})")
    first = result.timings.first_token or 0.0
    rest = max(result.timings.total - first, 1e-9)
    rate = (result.usage.completion_tokens - 1) / rest
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
    places = " and ".join(map(str, held))
    share = max((shares[page] for page in held if page in shares), default=None)
    what = "not selected"
    if share is not None:
        what = f"selected; a head gave it {share:.0%} of its attention"
    elif held.start >= count - 2:
        what = "in the window, which is always read"
    console.print(f"secret  in page {places}: {what}")
    console.print()
    console.print(page_map(count, shares, held, console.width))
    console.print(
        f"[dim]a sign is a page: · not selected, {_SHADES} selected, by the most attention that a "
        "head gave it; [/dim][green]green[/green][dim] holds the secret and was selected, [/dim]"
        "[red]red[/red][dim] holds it and was not[/dim]",
        soft_wrap=True,
    )


def spelling(tokens: Sequence[TracedToken], secret: str) -> Sequence[TracedToken]:
    """The tokens that say the secret, or the first number; all of them if there is none."""
    said = "".join(token.text or "" for token in tokens)
    found = re.search(re.escape(secret), said) or re.search(r"\d+", said)
    if found is None:
        return tokens
    kept, end = [], 0
    for token in tokens:
        begin, end = end, end + len(token.text or "")
        if begin < found.end() and end > found.start():
            kept.append(token)
    return kept


def strongest(tokens: Sequence[TracedToken]) -> dict[int, float]:
    """The largest share that each selected page has in any token, layer and head."""
    most: dict[int, float] = {}
    for token in tokens:
        for read in token.layers:
            for pages, group in zip(read.pages, read.weights, strict=True):
                for head in group:
                    for page, weight in zip(pages, head, strict=True):
                        most[page] = max(most.get(page, 0.0), weight)
    return most


def said_secret(said: str, secret: str) -> bool:
    """A number must be the one that is said; words must be among what is said."""
    from cairn.eval.scoring import is_right

    return is_right(said, secret) if secret.isdecimal() else secret in said


def page_map(count: int, shares: Mapping[int, float], held: Collection[int], width: int) -> Text:
    """All pages in reading order, a sign each."""
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
