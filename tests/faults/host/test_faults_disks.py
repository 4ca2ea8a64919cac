"""Full and read-only disks: what is told, and that production comes back as soon as something can be written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_disk import SmallDisk
from fault_host import SAMPLES, FaultHost, MakeHost, Row, until
from fault_stages import AT, EXTRACT, EXTRACTION, STOP, Verb, give_back

from hsx_host import health, lease

Break = Callable[[SmallDisk], None]

SHORT_TTL_S = 8.0
FULL, READ_ONLY = SmallDisk.fill, SmallDisk.read_only
KINDS = [pytest.param(FULL, "full disk", (75, "again"), id="full"),
         pytest.param(READ_ONLY, "read-only disk", (2, "bad_input"), id="read-only")]  # fmt: skip


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    """The file system of the host's home, or of the data set."""
    made = SmallDisk(tmp_path / str(request.param))
    yield made
    made.close()


def answered(host: FaultHost, verb: Verb, wanted: tuple[int, str]) -> str:
    """The verb says what is wrong with the disk, by its exit code and its kind; the message."""
    said = host.verb(*verb)
    assert (said.rc, said.document["kind"]) == wanted, said
    return str(said.document["message"])


@pytest.mark.parametrize("disk", ["home"], indirect=True)
@pytest.mark.parametrize(("strike", "fault", "wanted"), KINDS)
def test_the_home_before_the_host_is_borrowed(
    make_host: MakeHost, row: Row, disk: SmallDisk, strike: Break, fault: str, wanted: tuple[int, str]
) -> None:
    row(f"{fault} (home)", "before acquire")
    host = make_host()
    assert host.owner is not None
    strike(disk)
    message = answered(host, ("acquire",), wanted)
    assert lease.read(host.spec) is None
    assert host.owner.poll() is None
    disk.mend()
    host.ok("acquire")
    give_back(host)
    host.settled()
    assert host.owner.poll() is None
    row(
        end="refused, production untouched; goes on once it can write",
        log=f"exit {wanted[0]}: {message.split(' (')[0].split(';')[0]}",
    )


@pytest.mark.parametrize("disk", ["home"], indirect=True)
@pytest.mark.parametrize(("strike", "fault", "wanted"), KINDS)
@pytest.mark.parametrize(
    ("stage", "verb"),
    [("lease held", STOP), ("production stopped", EXTRACTION)],
    ids=["lease-held", "production-stopped"],
)
def test_the_home_while_the_host_is_borrowed(
    make_host: MakeHost,
    row: Row,
    disk: SmallDisk,
    strike: Break,
    fault: str,
    wanted: tuple[int, str],
    stage: str,
    verb: Verb,
) -> None:
    """The next step says so; then Airflow goes, and the guard tries until the disk is mended."""
    row(f"{fault} (home)", stage)
    host = make_host(ttl_s=SHORT_TTL_S)
    with host.polled():
        AT[stage].bring(host)
    strike(disk)
    answered(host, verb, wanted)
    until(host.lapsed, "the lease lapses")
    disk.mend()
    host.settled()
    row(
        end="the guard restores as soon as it can write; production as it was, lease free, nothing left",
        log=f'exit {wanted[0]} of the step; journal: "lease lapsed", "guard: production is not back yet"',
    )


@pytest.mark.parametrize("disk", ["home"], indirect=True)
@pytest.mark.parametrize(("strike", "fault", "wanted"), KINDS)
def test_production_comes_back_although_nothing_can_be_written(
    make_host: MakeHost, row: Row, disk: SmallDisk, strike: Break, fault: str, wanted: tuple[int, str]
) -> None:
    row(f"{fault} (home)", "extraction up, giving back")
    host = make_host(ttl_s=SHORT_TTL_S)
    with host.polled():
        AT["extraction up"].bring(host)
    strike(disk)
    said = host.verb("serve", "production")
    assert said.rc == 0, said
    assert health.problem(host.spec.production) == ""
    until(host.lapsed, "the lease lapses")
    disk.mend()
    host.settled()
    row(
        end="production comes back at once, the guard writes it down as soon as it can; lease free, nothing left",
        log="serve production: the journal takes no line",
    )


@pytest.mark.parametrize("disk", ["out"], indirect=True)
@pytest.mark.parametrize(("strike", "fault", "wanted"), KINDS)
def test_the_data_set_s_disk_in_mid_shard(
    make_host: MakeHost, row: Row, disk: SmallDisk, strike: Break, fault: str, wanted: tuple[int, str], tmp_path: Path
) -> None:
    row(f"{fault} (output)", "extracting")
    host = make_host(out=disk.at)
    job = AT["extracting"].bring(host)
    strike(disk)
    host.free()
    said = host.end_of(job)
    assert (said.rc, said.document["kind"]) == wanted, said
    left = host.published()
    assert left < SAMPLES
    disk.mend()
    assert host.run(*EXTRACT).rc == 0
    assert host.published() == SAMPLES
    give_back(host)
    host.settled()
    row(end="the shard goes on where it stopped once it can write; production as it was, lease free, nothing left",
        log=f"exit {wanted[0]}: {said.document['message'].split(';')[0]}")  # fmt: skip
