"""Somebody else on the port or on the GPU: named, never touched, and production comes back when there is room."""

from __future__ import annotations

import time

import pytest
from fault_host import MakeHost, Row, until
from fault_stages import ACQUIRE, AT, EXTRACTION, PRODUCTION, STOP, Verb, give_back

SHORT_TTL_S = 6.0
END = "the stranger lives; production as it was, lease free, nothing left"


@pytest.mark.parametrize(
    ("stage", "verb"),
    [
        pytest.param("production stopped", EXTRACTION, marks=pytest.mark.quick),
        ("extraction up", EXTRACTION),
        ("extraction up", PRODUCTION),
    ],
    ids=["production-stopped", "extraction-up", "giving-back"],
)
def test_a_stranger_takes_the_port(make_host: MakeHost, row: Row, stage: str, verb: Verb) -> None:
    """The step is refused by name; then Airflow goes, and the guard tries until the stranger has gone."""
    row("stranger on the port", f"{stage}, then {' '.join(verb)}")
    host = make_host(ttl_s=SHORT_TTL_S)
    port = host.spec.production.port
    with host.polled():
        AT[stage].bring(host)
        server = host.server()
        if server is not None and server.phase != "stopped":
            host.kill(server.pid)
            until(lambda: host.mode() == "none", "the server is gone")
        stranger = host.stranger(port)
        said = host.run(*verb)
    assert said.rc == 3, said
    assert f"pid {stranger.pid}" in said.document["message"]
    until(lambda: host.told("guard: production is not back yet"), host.story)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    host._strangers.clear()
    host.settled()
    row(
        end="refused by name, the stranger lives; once it has gone the guard restores production as it was",
        log='exit 3: port N is held by a stranger: pid, user, command; journal: "guard: production is not back yet"',
    )


def test_a_stranger_on_the_extraction_s_own_port(make_host: MakeHost, row: Row) -> None:
    row("stranger on the port", "extraction port of its own, lease held")
    host = make_host()
    host.other_extraction_port()
    stranger = host.stranger(host.spec.extraction.port)
    host.ok(*ACQUIRE)
    said = host.run(*EXTRACTION)
    assert said.rc == 3, said
    assert host.owner is not None
    assert host.owner.poll() is None, "production was stopped although nothing could take its place"
    give_back(host)
    host.settled()
    assert stranger.poll() is None
    row(
        end=f"refused before production is stopped; {END}",
        log="exit 3: port N is held by a stranger: pid, user, command",
    )


@pytest.mark.parametrize("verb", [STOP, EXTRACTION, PRODUCTION], ids=["stop", "extraction", "giving-back"])
def test_a_stranger_on_the_gpu(make_host: MakeHost, row: Row, verb: Verb) -> None:
    """nvidia-smi (a stand-in) counts memory for somebody else's process all the time."""
    row("stranger on the GPU (nvidia-smi stand-in)", " ".join(verb))
    host = make_host()
    stranger = host.stranger(0)
    host.gpu.write_text(f"{stranger.pid}, 4096\n")
    AT["lease held" if verb != PRODUCTION else "extraction up"].bring(host)
    said = host.run(*verb)
    assert said.rc == 0, said
    assert f"pid {stranger.pid}" in said.log, "who else holds device memory is told"
    give_back(host)
    host.settled()
    row(end=f"named, not waited for; {END}", log="the verb's log names its pid and memory")


def test_device_memory_is_freed_late(make_host: MakeHost, row: Row) -> None:
    """The driver still counts memory for the server's process after it has ended: the stop waits for it."""
    row("device memory freed late (nvidia-smi stand-in)", "production stopping")
    host = make_host()
    assert host.owner is not None
    host.gpu.write_text(f"{host.owner.pid}, 70000\n")
    host.ok(*ACQUIRE)
    job = host.start(*STOP)
    host.owner.wait()
    time.sleep(2.0)  # nothing tells that a wait goes on, but that it has not ended
    assert not host.told("server stopped")
    host.gpu.write_text("")
    assert host.end_of(job).rc == 0
    give_back(host)
    host.settled()
    row(
        end="the stop waits until the driver counts nothing; production as it was, lease free",
        log='journal: "server stopped" comes later',
    )
