"""A stand-in for the extraction server and the capture plugin, for faults that a real server never gives on demand."""

from __future__ import annotations

import json
import threading
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import host_data as h
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsx_host import borrow, extract, fingerprint, formats, proof
from hsx_host import contract as c
from hsx_host.client import Engine
from hsx_host.shards import ShardFiles
from hsx_host.spool import CaptureRecord, CaptureRequest, PlaneRecord

Change = Callable[[dict[str, Any], CaptureRecord], "tuple[dict[str, Any], CaptureRecord | None]"]


class StandIn:
    """Server and plugin in one. ``change`` may spoil the answer and the record; ``status`` other than 200 refuses."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.change: Change | None = None
        self.status: Callable[[list[int]], int] = lambda ids: 200
        self.rids: list[str] = []
        self.aborted: list[str] = []
        self.next_token: Callable[[Any], int] = lambda last: 7
        self.states: Callable[[list[int]], list[Any]] = lambda ids: h.states(len(ids), seed=sum(ids))
        self.alive = True
        self.key = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def engine(self) -> Engine:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return Engine(self.url, self.spool, lambda: self.alive, headers)

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        rid, ids = body["rid"], body["input_ids"]
        self.rids.append(rid)
        status = self.status(ids)
        if status != 200:
            return status, {"error": "the stand-in refuses"}
        request = c.decode(CaptureRequest, (self.spool / f"{rid}.json").read_bytes())
        planes = self.states(ids)
        crcs = h.fill(Path(request.path), formats.Laid(0, request.planes, {}, len(ids), {}), planes)
        said = zlib.crc32(np.array(ids, "<i8").tobytes())
        record = CaptureRecord(
            rid, len(ids), 0, 1, said, [PlaneRecord(p.name, crcs[p.name], True, False, False) for p in request.planes]
        )
        answer = {
            "output_ids": [self.next_token(planes[-1][-1])],
            "meta_info": {"prompt_tokens": len(ids), "cached_tokens": 0},
        }
        kept: CaptureRecord | None = record
        if self.change:
            answer, kept = self.change(answer, record)
        if kept is not None:
            (self.spool / f"{rid}.tmp").write_text(c.encode(kept))
            (self.spool / f"{rid}.tmp").rename(self.spool / f"{rid}.done.json")
        return 200, answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if stand_in.key and self.headers.get("Authorization") != f"Bearer {stand_in.key}":
                    self.send_error(401)
                    return
                status, answer = stand_in._answer(body) if self.path == "/generate" else (200, {})
                if self.path == "/abort_request":
                    stand_in.aborted.append(body["rid"])
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def serve_extraction(server: StandIn, spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in the extraction server of a planned run; its next tokens are those of the model's head."""
    weight = {"weight": torch.ones(h.HIDDEN).bfloat16(), "eps": torch.tensor([1e-5], dtype=torch.float64)}
    save_file(weight, server.spool / proof.NORM_FILE)
    prover = proof.NextToken(spec.model.path, server.spool / proof.NORM_FILE)
    head = torch.from_numpy(prover.head.rows(0, prover.head.shape[0]))
    server.next_token = lambda last: int((head @ prover.normed(last).float()).argmax())

    @contextmanager
    def borrowed(given: c.RunSpec) -> Iterator[None]:
        yield

    monkeypatch.setattr(borrow, "extraction_server", borrowed)
    monkeypatch.setattr(extract, "live_engine", lambda given: server.engine())
    monkeypatch.setattr(extract, "ready_norm_class", lambda spool: "RMSNorm")


def meta(answer: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**answer, "meta_info": {**answer["meta_info"], **values}}


def planes(record: CaptureRecord, **flags: Any) -> CaptureRecord:
    return replace(record, planes=[replace(record.planes[0], **flags), *record.planes[1:]])


FAULTS: dict[str, tuple[Change, str]] = {
    "rows missing": (lambda a, r: (a, replace(r, rows=8)), "9 sent, 8 dumped, 0 cached: 8 rows for 9 tokens"),
    "cached": (lambda a, r: (meta(a, cached_tokens=4), r), "4 tokens came from a cache"),
    "no count of cached": (lambda a, r: (meta(a, cached_tokens=None), r), "None tokens came from a cache"),
    "prompt cut": (lambda a, r: (meta(a, prompt_tokens=5), r), "counted 5 prompt tokens"),
    "other ids": (lambda a, r: (a, replace(r, ids_crc32=1)), "other token ids"),
    "NaN": (lambda a, r: (a, planes(r, finite=False)), "layer_1 is not finite"),
    "zero": (lambda a, r: (a, planes(r, zero=True, constant=True)), "layer_1 is all zero"),
    "constant": (lambda a, r: (a, planes(r, constant=True)), "layer_1 is constant"),
    "plane missing": (lambda a, r: (a, replace(r, planes=r.planes[1:])), "planes ['layer_3'"),
    "planes swapped": (lambda a, r: (a, replace(r, planes=r.planes[::-1])), "planes ['final'"),
    "plugin's error": (lambda a, r: (a, replace(r, error="a writer broke", rows=3)), "the plugin says: a writer broke"),
    "no token": (lambda a, r: ({**a, "output_ids": []}, r), "output_ids are []"),
    "no meta_info": (lambda a, r: ({"text": ""}, r), "no meta_info"),
}


def extracted(spec: c.RunSpec) -> c.ShardSummary:
    return extract.run(spec, Namespace(shard=0, stop_after=0.0))


def files_of(spec: c.RunSpec) -> ShardFiles:
    return ShardFiles(fingerprint.opened(spec)[0], 0)
