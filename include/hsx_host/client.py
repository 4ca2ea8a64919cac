"""One sample through the extraction server: lay the file out, ask, wait for the plugin's record, check everything.

Nothing here decides about retries or names: a try either gives a whole, checked, unpublished file, or a reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import urllib3

from hsx_host import capture_server
from hsx_host.arrivals import Arrivals
from hsx_host.contract import ContractError, RunSpec, decode, encode
from hsx_host.dataset import Sample
from hsx_host.errors import Refused, TryAgain
from hsx_host.formats import Format, Laid, Shape
from hsx_host.layouts import faults
from hsx_host.spool import CaptureRecord, CaptureRequest

_GONE_AFTER_S = 3.0  # a killed server's main process may outlive its sockets by a moment


class SampleFault(Exception):
    """A try of one sample failed. ``final``: the server refused the request itself, so that a retry can't help."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.final = reason, final


class ServerGone(Exception):
    """The extraction server is gone: no sample's fault."""


class NoSpace(Exception):
    """The data set's file system is full: no sample's fault."""


@dataclass(frozen=True)
class Engine:
    """A live extraction server: where it listens, its spool, and whether all of its processes still live."""

    url: str
    spool: Path
    alive: Callable[[], bool]
    headers: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Captured:
    """A whole and checked file that has no final name yet."""

    path: Path
    bytes: int
    crc32: dict[str, int]
    next_token: int
    rid: str
    text: str


def live_engine(spec: RunSpec) -> Engine:
    """The extraction server that runs now (inside ``borrow.extraction_server``)."""
    from hsx_host import procid, serve, servers, state

    spool = serve.extraction_spool(spec)
    server = state.read_server(spec)
    assert server is not None
    main = procid.ProcId(server.pid, server.start)
    schedulers = [procid.identify(one.pid) for one in capture_server.ready(spool)]
    parts = [main, *schedulers]  # SGLang ends itself some time after a scheduler; requests to it hang until then
    alive: Callable[[], bool] = lambda: all(p is not None and procid.alive(p) for p in parts)  # noqa: E731
    return Engine(servers.url(spec.extraction), spool, alive, servers.headers(spec.extraction))


class Client:
    """Asks for samples; safe for many threads.

    Requests go through urllib3's pool itself: one of ``requests`` costs three times the processor time, and all of a
    shard's threads share one interpreter's lock (``bench/host_plane.py``).

    :param folder: where unfinished files lie, on the data set's own file system. One client at a time has a folder
        (it holds the shard's lock): what an earlier one left in the spool is withdrawn.
    :param timeout_s: how long one try may take, from the request to the plugin's record.
    :param concurrency: how many connections are kept open.
    """

    def __init__(
        self, engine: Engine, form: Format, shape: Shape, folder: Path, timeout_s: float, concurrency: int = 1
    ) -> None:
        self._engine, self._form, self._shape = engine, form, shape
        self._folder, self._timeout_s = folder, timeout_s
        parts = urllib.parse.urlsplit(engine.url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._pool = urllib3.connection_from_url(engine.url, maxsize=concurrency, retries=False)
        self._flying: set[str] = set()
        self._records = Arrivals(engine.spool)
        self._prefix = f"hsx-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}-"
        folder.mkdir(parents=True, exist_ok=True)
        self.withdraw()

    def capture(self, sample: Sample) -> Captured:
        """One try of one sample.

        :raises SampleFault: with the reason; ``ServerGone``, ``NoSpace``: nothing is wrong with the sample.
        """
        rid = f"{self._prefix}{uuid.uuid4().hex}"
        path = self._folder / f"{rid}.part"
        self._flying.add(rid)
        try:
            laid = self._lay_out(path, sample)
            request = CaptureRequest(rid, str(path), len(sample.ids), laid.crcs["input_ids"], laid.planes)
            _write(self._engine.spool / f"{rid}.json", encode(request))
            deadline = time.monotonic() + self._timeout_s
            answer = self._generate(rid, sample)
            record = self._record(rid, deadline)
            captured = self._check(path, sample, laid, answer, record)
            return replace(captured, crc32=self._form.complete(path, laid, captured.crc32, self._shape))
        except BaseException as e:
            path.unlink(missing_ok=True)
            if faults.is_full(e):
                raise NoSpace(str(e)) from None
            raise
        finally:
            self._flying.discard(rid)
            for name in (f"{rid}.json", f"{rid}.done.json"):
                (self._engine.spool / name).unlink(missing_ok=True)

    def server_lives(self) -> bool:
        """Whether no process of the server has ended."""
        return self._engine.alive()

    def abort(self) -> None:
        """Tell the server to drop what is in flight, so that waiting threads end soon."""
        for rid in list(self._flying):
            self._drop(rid)

    def withdraw(self) -> None:
        """Take back what a killed client left in the spool; the server drops what it still works on."""
        left = [p.name.split(".")[0] for p in self._engine.spool.glob(f"{self._prefix}*.json")]
        for rid in set(left):
            for name in (f"{rid}.json", f"{rid}.done.json"):
                (self._engine.spool / name).unlink(missing_ok=True)
            self._drop(rid)

    def _lay_out(self, path: Path, sample: Sample) -> Laid:
        laid = self._form.lay_out(path, sample.ids, sample.mask, self._shape)
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < laid.bytes:  # the file is sparse: the plugin would be the one to run out
            raise NoSpace(f"{disk.f_bavail * disk.f_frsize} bytes are free, the next sample needs {laid.bytes}")
        return laid

    def _generate(self, rid: str, sample: Sample) -> dict[str, Any]:
        body = {
            "rid": rid,
            "input_ids": sample.ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            "stream": False,
        }
        try:
            status, data = self._post("/generate", body, self._timeout_s)
        except urllib3.exceptions.ReadTimeoutError:
            self._gone("no answer")
            raise SampleFault(f"no answer from the server in {self._timeout_s:.0f} s") from None
        except urllib3.exceptions.HTTPError as e:
            self._gone(str(e), patience_s=_GONE_AFTER_S)
            raise SampleFault(f"the connection broke: {e}") from None
        text = data[:300].decode(errors="replace")
        if status != 200:
            # SGLang answers 400 to a request that it won't take and to one that was aborted: only the first is final
            final = status == 400 and "abort" not in text.lower()
            raise SampleFault(f"the server answered {status}: {text}", final=final)
        try:
            found = json.loads(data)
        except ValueError:
            raise SampleFault(f"the server's answer is not JSON: {text!r}") from None
        if not isinstance(found, dict) or not isinstance(found.get("meta_info"), dict):
            raise SampleFault(f"the server's answer has no meta_info: {text!r}")
        return found

    def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, bytes]:
        """Status and body of an answer; raises urllib3's own errors."""
        answer = self._pool.urlopen(
            "POST",
            path,
            body=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self._engine.headers},
            timeout=urllib3.Timeout(connect=min(10, timeout_s), read=timeout_s),
            redirect=False,
        )
        return answer.status, answer.data

    def _drop(self, rid: str) -> None:
        """Tell the server, if it still listens, that nobody waits for a request any more."""
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            self._post("/abort_request", {"rid": rid}, 5)

    def _record(self, rid: str, deadline: float) -> CaptureRecord:
        """Wait for the plugin's record: its writers finish a little behind the answer."""
        name = f"{rid}.done.json"
        while not self._records.wait(name, min(1.0, max(0.0, deadline - time.monotonic()))):
            self._gone("waiting for the plugin's record")
            if time.monotonic() > deadline:
                raise SampleFault(f"the server answered, the plugin wrote no record in {self._timeout_s:.0f} s")
        try:
            return decode(CaptureRecord, (self._engine.spool / name).read_bytes())
        except ContractError as e:
            raise SampleFault(f"the plugin's record does not fit: {e}") from None

    def _check(self, path: Path, sample: Sample, laid: Laid, answer: dict[str, Any], record: CaptureRecord) -> Captured:
        meta, sent = answer["meta_info"], len(sample.ids)
        cached, seen = meta.get("cached_tokens"), meta.get("prompt_tokens")
        text = f"{sent} sent, {record.rows} dumped, {cached} cached"
        if record.error:
            if "No space left" in record.error or "Disk quota" in record.error:
                raise NoSpace(record.error)
            raise SampleFault(f"{text}: the plugin says: {record.error}")
        problems = []
        if record.rows != sent:
            problems.append(f"{record.rows} rows for {sent} tokens")
        if seen != sent:
            problems.append(f"the server counted {seen} prompt tokens")
        if cached != 0:
            problems.append(f"{cached} tokens came from a cache (is the radix cache on?)")
        if record.ids_crc32 != laid.crcs["input_ids"]:
            problems.append("the model saw other token ids")
        if [p.name for p in record.planes] != self._shape.planes:
            problems.append(f"planes {[p.name for p in record.planes]} instead of {self._shape.planes}")
        for plane in record.planes:
            if not plane.finite:
                problems.append(f"{plane.name} is not finite")
            elif plane.zero:
                problems.append(f"{plane.name} is all zero")
            elif plane.constant:
                problems.append(f"{plane.name} is constant")
        tokens = answer.get("output_ids")
        if not isinstance(tokens, list) or len(tokens) != 1 or type(tokens[0]) is not int:
            problems.append(f"output_ids are {tokens!r} instead of one token")
        size = path.stat().st_size
        if size != laid.bytes:
            problems.append(f"the file has {size} bytes instead of {laid.bytes}")
        if problems:
            raise SampleFault(f"{text}: " + "; ".join(problems))
        crcs = laid.crcs | {p.name: p.crc32 for p in record.planes}
        return Captured(path, laid.bytes, crcs, int(tokens[0]) if tokens else -1, record.rid, text)

    def _gone(self, why: str, patience_s: float = 0.0) -> None:
        """Raise ServerGone where a process of the server has ended, or it refuses connections."""
        end = time.monotonic() + patience_s
        while True:
            if not self._engine.alive():
                _gone(f"a process of it has ended ({why})")
            try:  # a connection and no request: SGLang's /health would generate a token in a busy server
                socket.create_connection(self._address, timeout=5).close()
            except TimeoutError:
                pass
            except OSError:
                _gone(f"it takes no connection ({why})")
            if time.monotonic() >= end:
                return
            time.sleep(0.2)


def _gone(why: str) -> NoReturn:
    raise ServerGone(f"the extraction server is gone: {why}")


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for another process that may look at once; the spool needs no fsync."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)


def ready_norm_class(spool: Path) -> str:
    """The class of the model's final norm, as the plugin saw it; Refused where the plugin captures nothing, and why."""
    said = capture_server.ready(spool)
    for one in said:
        if one.error:
            raise Refused(
                f"the capture plugin captures nothing: {one.error}",
                field="capture plugin",
                value=spool,
                fix="start the extraction server with serve extraction",
            )
    if not said:
        raise TryAgain("no scheduler has loaded the capture plugin", field="capture plugin", value=spool)
    return said[0].norm_class
