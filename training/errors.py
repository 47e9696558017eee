from __future__ import annotations


class UsageError(Exception):
    """What was asked for cannot be: the message says what to ask for instead."""
