"""``python -m hsx_host VERB --spec PATH``: one verb, one JSON document on stdout, progress on stderr.

Exit codes: 0 done; 2 bad input or configuration; 3 refused by a safety check; 75 try again later; 1 a bug.
With another code than 0 the document is an ErrorDoc.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hsx_host import byhand, guards, jobs, state, verbs
from hsx_host.contract import ContractError, ErrorDoc, RestoreReport, RunSpec, StatusResult, decode, encode
from hsx_host.errors import AGAIN, BAD_INPUT, BUG, OK, BadInput, HsxError, TryAgain
from hsx_host.layouts import faults
from hsx_host.progress import say

BY_HAND = {"status", "restore", "recover", "release"}
# Verbs that write into the home only: what they make is this login's alone. A server has production's own umask.
PRIVATE = {
    *BY_HAND, "acquire", "heartbeat", "guard", "serve", "patch", "preflight", "disk", "cleanup", "benchmark",
}  # fmt: skip
# Verbs that start or stop servers, or say who may: for hsx's own login alone. (A guard was started by it.)
OWN_LOGIN = {"acquire", "release", "heartbeat", "serve", "patch", "probe", "extract", "restore", "recover"}
# A call of one of these is a sign of life of its run: the lease is renewed and its guards are looked after.
RENEWING = set(verbs.VERBS) - {*BY_HAND, "acquire", "heartbeat", "guard", "job"}

EXIT_CODES = """exit codes:
  0   done: stdout holds the result
  2   bad input or configuration (a retry can't help)
  3   refused by a safety check (a retry can't help)
  75  try again later: the host is held, a server died, the verb was stopped by a signal
  1   a bug: the traceback is on stderr
With another code than 0 stdout holds an ErrorDoc: message, field, value, fix."""


class _Parser(argparse.ArgumentParser):
    """argparse, with its complaint as an ErrorDoc like every other bad input."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(message, field="command line", value=" ".join(sys.argv[1:]), fix=self.format_usage().strip())


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. Writes exactly one JSON document to stdout (help text apart)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return OK if argv else BAD_INPUT
    if argv[0] in verbs.VERBS and {"-h", "--help"} & set(_split(argv)[0]):
        sys.stdout.write(_parser(argv[0]).format_help())
        return OK
    with _umask(argv[0]), _stdout_to_stderr() as out:
        document, code = _answer(argv)
        told = _for_people(document) if os.isatty(out) else ""
        _write_all(out, ((told or encode(document)) + "\n").encode())
    return code


def _for_people(document: Any) -> str:
    """What a person reads in a terminal; empty where that is the document itself."""
    if isinstance(document, StatusResult):
        from hsx_host import status

        return "\n".join(status.lines(document))
    if isinstance(document, RestoreReport):
        from hsx_host import restore

        return "\n".join(restore.lines(document))
    return ""


def _answer(argv: list[str]) -> tuple[Any, int]:
    """The verb's document and exit code, whatever happens in it."""
    try:
        return _run(argv), OK
    except HsxError as e:
        say(f"{type(e).__name__}: {e}\n")
        return e.doc, e.code
    except KeyboardInterrupt:
        return ErrorDoc(kind="again", message=f"{argv[0]} was stopped by a signal", fix="start it again"), AGAIN
    except OSError as e:
        if (error := _of_the_host(e)) is None:
            traceback.print_exc()
            return ErrorDoc(kind="bug", message=f"{type(e).__name__}: {e}"), BUG
        say(f"{type(error).__name__}: {error}\n")
        return error.doc, error.code
    except Exception as e:
        traceback.print_exc()
        return ErrorDoc(kind="bug", message=f"{type(e).__name__}: {e}"), BUG


def _of_the_host(e: OSError) -> HsxError | None:
    """What a file system says that a person can act on; None for anything else."""
    where = e.filename or "the host's home or output root"
    if faults.is_full(e):
        return TryAgain(f"no space: {e.strerror}", field="disk", value=where, fix="make room, then start it again")
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return BadInput(f"{e.strerror}", field="path", value=where, fix="name a folder that this login may write")
    if e.errno in (errno.EISDIR, errno.ELOOP) and e.filename:
        return BadInput(f"{e.strerror}", field="path", value=where, fix="move it away: a file belongs there")
    if e.errno in faults.PASSING:
        return faults.unreadable(Path(os.fsdecode(where)), e)
    return None


def _run(argv: list[str]) -> Any:
    verb, rest = argv[0], argv[1:]
    if verb not in verbs.VERBS:
        raise BadInput("no such verb", field="verb", value=verb, fix="one of " + ", ".join(verbs.VERBS))
    rest, command = _split(rest)
    args = _parser(verb).parse_args(rest)
    args.command = command
    if args.spec is None:
        args.spec = last_spec()
    spec = read_spec(args.spec)
    if verb in OWN_LOGIN or getattr(args, "renew", False):
        byhand.check_login(spec, verb)
    _stop_on_sigterm()
    if verb in RENEWING and jobs.JOB_VARIABLE not in os.environ:
        with contextlib.suppress(HsxError, OSError):  # a verb that must hold the lease says so itself
            byhand.check_login(spec, verb)
            guards.renew(spec)
    return verbs.load(verb).run(spec, args)


def _parser(verb: str) -> _Parser:
    module = verbs.load(verb)
    parser = _Parser(
        prog=f"python -m hsx_host {verb}",
        description=f"{module.HELP}\n\n{module.__doc__ or ''}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this text")
    own = verb in BY_HAND
    text = "the run's frozen RunSpec (JSON)" + ("; default: that of the run that had the host last" if own else "")
    parser.add_argument("--spec", required=not own, metavar="PATH", help=text)
    module.add_arguments(parser)
    return parser


def last_spec() -> str:
    """The spec that a person's command goes by: of the run that holds the host, else of the last one that did."""
    home = os.environ.get(byhand.HOME_VARIABLE, "")
    program = Path(__file__).resolve().parents[1]
    if not home and program.parent.name == "bundles":
        home = str(program.parents[1])
    if not home:
        raise BadInput(
            "no spec was named", field="--spec", fix=f"name one, or set {byhand.HOME_VARIABLE} to hsx's home"
        )
    kept = Path(home, "state", "spec.json")
    try:
        run_id = json.loads(Path(home, "state", "lease.json").read_bytes())["run_id"]
        held = Path(home, "runs", state.run_key(run_id), "spec.json")
        kept = held if held.is_file() else kept
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nobody has the host, or its lease can't be read: the last one will do
    if not kept.is_file():
        raise BadInput(
            "no run has had this host yet", field="--spec", value=kept, fix="name a spec: a file of <home>/specs"
        )
    return str(kept)


def read_spec(path: str) -> RunSpec:
    """The RunSpec in a file; BadInput names the file, or the field that does not fit."""
    try:
        return decode(RunSpec, Path(path).read_bytes())
    except OSError as e:
        raise BadInput(
            f"the spec can't be read: {e.strerror}", field="--spec", value=path, fix="give the path that plan answered"
        ) from None
    except ContractError as e:
        raise BadInput(
            f"the spec does not fit: {e}",
            field=_field_of(str(e)),
            value=path,
            fix="ship the spec of this version of hsx",
        ) from None


def _field_of(message: str) -> str:
    head = message.split(":", 1)[0]
    if "field " in message:
        name = message.split("field ", 1)[1].split(" ", 1)[0]
        return f"{head}.{name}".removeprefix("RunSpec.")
    return "--spec" if head == "RunSpec" else head.removeprefix("RunSpec.")


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Cut at the first ``--``: what follows is the command of ``job start``."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _overview() -> str:
    lines = [
        "usage: python -m hsx_host VERB --spec PATH [flags]    (VERB --help says more)",
        "",
        __doc__ or "",
        "verbs:",
    ]
    lines += [f"  {verb:<14} {verbs.load(verb).HELP}" for verb in verbs.VERBS]
    return "\n".join([*lines, "", EXIT_CODES, ""])


def _stop_on_sigterm() -> None:
    """SIGTERM unwinds the verb like Ctrl-C (``finally`` blocks run); a second one does not disturb the unwinding."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


@contextmanager
def _umask(verb: str) -> Iterator[None]:
    """Files of a private verb are this login's alone."""
    before = os.umask(0o077)
    try:
        if verb not in PRIVATE:
            os.umask(before)
        yield
    finally:
        os.umask(before)


@contextmanager
def _stdout_to_stderr() -> Iterator[int]:
    """Point fd 1 at stderr, so that no library's print meets the document; gives the real stdout."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        yield out
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.close(out)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    sys.exit(main())
