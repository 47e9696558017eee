from __future__ import annotations


class UsageError(Exception):
    """An option that cannot be honoured; the message says what to use instead."""
