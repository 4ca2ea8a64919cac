"""Progress of a verb: JSON lines and plain log lines on stderr, which stdout's one document never meets."""

from __future__ import annotations

import contextlib
import json
import sys
import time

INTERVAL_S = 1.0


def log(text: str) -> None:
    """One plain line for a person, with the UTC time of day."""
    say(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}\n")


def say(text: str) -> None:
    """Write to stderr. A log file on a full disk loses the text, and nothing else is lost by that."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Progress:
    """Counts of one verb, written at most once a second.

    :param verb: the verb's name, the line's ``progress`` field.
    :param total: how many things there are to do; ``done`` in ``update`` counts the same things.
    """

    def __init__(self, verb: str, total: int) -> None:
        self.verb, self.total = verb, total
        self._began = time.monotonic()
        self._written = float("-inf")
        self._first: int | None = None
        self._ended = False

    def update(self, done: int, *, tokens: int = 0, bytes: int = 0) -> None:
        """Totals so far (not differences). ``rate``: things a second since the first call, ``eta`` in seconds.

        ``tok_s``: tokens a second since then; ``at``: unix seconds, so that the course of a job can be drawn later.
        """
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = done, now
        last = done >= self.total and not self._ended  # the end is told at once, and once
        if not last and now - self._written < INTERVAL_S:
            return
        self._ended = done >= self.total
        self._written = now
        spent = now - self._began  # tokens are counted from there too
        rate = (done - self._first) / spent if spent > 0 else 0.0
        eta = round((self.total - done) / rate, 1) if rate > 0 else None
        if sys.stderr.isatty():
            log(f"{self.verb}: {done} of {self.total}")
            return
        line = {
            "progress": self.verb,
            "done": done,
            "total": self.total,
            "tokens": tokens,
            "bytes": bytes,
            "rate": round(rate, 3),
            "tok_s": round(tokens / spent, 1) if spent > 0 else 0.0,
            "eta": eta,
            "at": round(time.time(), 1),
        }
        say(json.dumps(line) + "\n")
