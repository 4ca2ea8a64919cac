"""The one error of the demo: what a person can act on, in its message."""

from __future__ import annotations


class DemoError(Exception):
    """Something that the demo needs did not work; the message says what, and what to do."""
