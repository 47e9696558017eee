"""Every error a user can cause. Each message says what was asked, what is possible, what to do."""

from __future__ import annotations


class CairnError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(CairnError, ValueError):
    """An engine option, or a field of a model's config, that cannot be honoured."""


class LoadError(CairnError):
    """Weights or a tokenizer that cannot be read; names the file and the tensor."""


class RequestError(CairnError, ValueError):
    """A request that can never run: bad ids, bad sampling values, too long."""


class QueueFullError(CairnError):
    """The waiting queue is at its limit; the request may be sent again later."""


class PageError(CairnError):
    """Page bookkeeping was violated. Always a bug, never the user's fault."""


class RankError(CairnError):
    """A rank of several failed or ended: the engine cannot go on, and must be started again."""


def install(extra: str) -> str:
    """The command that installs an optional part. The name `cairn` is another project's."""
    return f"pip install 'cairn-llm[{extra}]'"
