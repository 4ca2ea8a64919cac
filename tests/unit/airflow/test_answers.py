"""What comes back over SSH becomes a document, or one error of the tree."""

from __future__ import annotations

import json

import pytest

from hsx_host import contract as c
from hsx_operators import errors as e
from hsx_operators.answers import human_bytes, human_line, human_seconds, parse_answer, verb_command

LEASE = c.Lease(run_id="r", since=1.0, expires=2.0)


def error(kind: str = "again") -> str:
    return c.encode(c.ErrorDoc(kind=kind, message="host is held", field="lease", value="run-7", fix="wait"))


def parse(rc: int, out: str, err: str = "") -> c.Lease:
    return parse_answer(c.Lease, "acquire", rc, out, err, "/opt/python")


def test_document() -> None:
    assert parse(0, c.encode(LEASE) + "\n") == LEASE


@pytest.mark.parametrize(
    ("rc", "cls"), [(2, e.HostBadInput), (3, e.HostRefused), (75, e.HostHeld), (1, e.HostBug), (9, e.HostBug)]
)
def test_exit_codes(rc: int, cls: type[e.VerbFailed]) -> None:
    with pytest.raises(e.VerbFailed) as caught:
        parse(rc, error(), "Traceback ...\nValueError: x")
    assert type(caught.value) is cls
    assert "lease = 'run-7': acquire: host is held" in str(caught.value)
    assert "(wait)" in str(caught.value)
    assert ("ValueError: x" in str(caught.value)) == (cls is e.HostBug)


@pytest.mark.parametrize(
    ("rc", "out", "err", "cls", "says"),
    [
        (127, "", "env: '/opt/python': No such file or directory", e.WrongHostPython, "host.python = '/opt/python'"),
        (126, "", "env: '/opt/python': Permission denied", e.WrongHostPython, "host.python"),
        (1, "", "/opt/python: No module named hsx_host", e.HostGarbage, "clear the plan task"),
        (1, "", "Segmentation", e.HostBug, "ended with exit 1 and no answer"),
        (137, "", "", e.RemoteJobDied, "killed by signal 9"),
        (-1, "", "", e.RemoteJobDied, "killed by a signal"),
        (0, "Welcome to gpu-7!\n{}", "", e.HostGarbage, "Welcome to gpu-7!"),
        (2, "usage: python", "", e.HostGarbage, "no ErrorDoc"),
        (0, "", "", e.HostGarbage, "not JSON"),
    ],
)
def test_no_document(rc: int, out: str, err: str, cls: type[Exception], says: str) -> None:
    with pytest.raises(cls) as caught:
        parse(rc, out, err)
    assert says in str(caught.value)
    assert type(caught.value) is cls


@pytest.mark.parametrize("change", [{"more": 1}, {"version": 2}, {"type": "JobStatus"}, {"since": "now"}])
def test_a_document_of_another_shape_fails_loudly(change: dict[str, object]) -> None:
    body = {**json.loads(c.encode(LEASE)), **change}
    with pytest.raises(e.HostGarbage, match="acquire: "):
        parse(0, json.dumps(body))


def test_command_is_quoted() -> None:
    command = verb_command("/opt/my python", "/srv/it's $HOME/bundles/b", ["plan", "--spec", "/x; rm -rf /"])
    assert command == (
        """env 'PYTHONPATH=/srv/it'"'"'s $HOME/bundles/b' PYTHONSAFEPATH=1 """
        """'PYTHONPYCACHEPREFIX=/srv/it'"'"'s $HOME/pycache' """
        """'/opt/my python' -m hsx_host plan --spec '/x; rm -rf /'"""
    )


def test_named_error_keeps_the_class() -> None:
    for cls in (e.HostUnreachable, e.HostKeyMismatch, e.HostTryAgain, e.HostBadInput, e.HostGarbage):
        made = e.named_error(cls.__name__, "why")
        assert type(made) is cls
        assert "why" in str(made)
    assert type(e.named_error("Unknown", "why")) is e.HostError


def test_progress_for_people() -> None:
    line = {"progress": "extract", "done": 12, "total": 32, "tokens": 4096, "bytes": 4718592, "rate": 0.5, "eta": 40.0}
    assert human_line(json.dumps(line)) == ("extract: 12 of 32 (37 %), 4,096 tokens, 4.5 MiB, 0.5 a second, 40 s to go")
    assert human_line(json.dumps({**line, "tok_s": 102.4})).endswith("4.5 MiB, 102 tokens/s, 40 s to go")
    assert human_line(json.dumps({"progress": "soak", "done": 0, "total": 0, "eta": None})) == "soak: 0 of 0"
    assert human_line("plain text") == "plain text"
    assert human_line('{"other": 1}') == '{"other": 1}'
    assert [human_bytes(n) for n in (5, 1536, 924 << 30, 3 << 40)] == ["5 B", "1.5 KiB", "924.0 GiB", "3.0 TiB"]
    assert [human_seconds(s) for s in (40, 600, 4000, 9000)] == ["40 s", "10 min", "67 min", "2 h 30 min"]
