"""What comes back over SSH, read strictly: one JSON document and an exit code become a contract type or an error."""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Sequence
from typing import TypeVar

from hsx_host import contract as c
from hsx_operators.errors import HostError, HostGarbage, RemoteJobDied, WrongHostPython, verb_error

T = TypeVar("T")


def verb_command(python: str, bundle_dir: str, args: Sequence[str]) -> str:
    """One simple, quoted command: no shell logic, whatever stands in the paths.

    Nothing is imported but what was shipped (and what is installed): no module of the folder that the login lands in,
    no byte code beside the sources. Byte code is kept in ``<home>/pycache``.
    """
    cache = posixpath.join(posixpath.dirname(posixpath.dirname(bundle_dir)), "pycache")
    own = [f"PYTHONPATH={bundle_dir}", "PYTHONSAFEPATH=1", f"PYTHONPYCACHEPREFIX={cache}"]
    return shlex.join(["env", *own, python, "-m", "hsx_host", *args])


def parse_answer(cls: type[T], verb: str, rc: int, stdout: str, stderr: str, python: str) -> T:
    """The document of a verb that ended with 0; the typed error for any other end.

    :param cls: the contract type that ``verb`` answers with.
    :param stderr: the end of it is shown where the program itself failed.
    :param python: the profile's ``host.python``, named where it isn't one.
    """
    if rc == 0:
        try:
            return c.decode(cls, stdout)
        except c.ContractError as e:
            raise _garbage(verb, str(e), stdout, stderr) from None
    raise failure(verb, rc, stdout, stderr, python)


def failure(verb: str, rc: int, stdout: str, stderr: str, python: str) -> HostError:
    """The typed error of a verb that ended with ``rc`` other than 0."""
    tail = "\n".join(stderr.strip().splitlines()[-15:])
    try:
        doc = c.decode(c.ErrorDoc, stdout)
    except c.ContractError:
        pass
    else:
        return verb_error(verb, rc, doc, tail)
    if rc in (126, 127):
        return WrongHostPython(
            f"can't be run on the host (exit {rc}): {tail or 'no such file'}",
            field="host.python",
            value=python,
            fix="set it to the Python that runs SGLang there",
        )
    if "No module named hsx_host" in stderr:
        return HostGarbage(
            "the shipped program is gone from the host", field="host.home", fix="clear the plan task: it ships it again"
        )
    if rc > 128 or rc < 0:
        by = f"killed by signal {rc - 128}" if rc > 128 else "killed by a signal"
        return RemoteJobDied(f"{verb}: {by} on the host", fix="look for the out-of-memory killer in its kernel log")
    if not stdout.strip():
        return verb_error(verb, rc, c.ErrorDoc(kind="bug", message=f"ended with exit {rc} and no answer"), tail)
    return _garbage(verb, f"ended with exit {rc} and no ErrorDoc", stdout, stderr)


def _garbage(verb: str, why: str, stdout: str, stderr: str) -> HostGarbage:
    return HostGarbage(
        f"{verb}: {why}; it said {stdout[:200]!r}" + (f"; stderr ends with {stderr[-300:]!r}" if stderr else ""),
        fix="nothing else may write to stdout: look for an echo in the login shell's start-up files on the host",
    )


def human_line(line: str) -> str:
    """A progress line as a person reads it; any other line as it is.

    ``{"progress": "extract", "done": 12, "total": 32, "tokens": 4096, "bytes": 4718592, "tok_s": 51.2, "eta": 40.0}``
    becomes ``extract: 12 of 32 (37 %), 4,096 tokens, 4.5 MiB, 51 tokens/s, 40 s to go``.
    """
    try:
        body = json.loads(line)
    except ValueError:
        return line
    if not isinstance(body, dict) or "progress" not in body:
        return line
    number = {k: v for k, v in body.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    done, total = number.get("done", 0), number.get("total", 0)
    parts = [f"{body['progress']}: {done:,} of {total:,}" + (f" ({100 * done // total} %)" if total else "")]
    if number.get("tokens"):
        parts.append(f"{number['tokens']:,} tokens")
    if number.get("bytes"):
        parts.append(human_bytes(number["bytes"]))
    if number.get("tok_s"):
        parts.append(f"{number['tok_s']:,.0f} tokens/s")
    elif number.get("rate"):
        parts.append(f"{number['rate']:,.3g} a second")
    if number.get("eta"):
        parts.append(f"{human_seconds(number['eta'])} to go")
    return ", ".join(parts)


def human_lines(log: str) -> list[str]:
    """Each line of a job's log as a person reads it."""
    return [human_line(line) for line in log.splitlines()]


def human_bytes(n: float) -> str:
    """1536 -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def human_seconds(s: float) -> str:
    """4000 -> ``1 h 7 min``."""
    if s < 120:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 7200 else f"{s // 3600:.0f} h {s % 3600 / 60:.0f} min"
