"""Top-up: prompts, answers of a stand-in for production, resuming, and the shards that plan makes of them."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import plan, prompts, topup
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.shards import ShardFiles, read_input


class Production:
    """Answers ``/health`` and ``/generate``: the prompt's ids plus the turn, as ``answer`` says."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], list[int]] = lambda body: [
            (sum(body["input_ids"]) + body["sampling_params"].get("sampling_seed", 0) + i) % h.VOCAB for i in range(3)
        ]
        self.fail_after = 10**9
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _say(self, status: int, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._say(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "sampling_seed" not in body["sampling_params"]:  # the health check
                    return self._say(200, {"output_ids": [1], "meta_info": {"completion_tokens": 1}})
                if len(outer.asked) >= outer.fail_after:
                    return self._say(500, {"error": "gone"})
                outer.asked.append(body)
                ids = outer.answer(body)
                return self._say(200, {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}})

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self.server.server_port


@pytest.fixture
def production() -> Iterator[Production]:
    made = Production()
    yield made
    made.server.shutdown()
    made.server.server_close()


def spec_of(root: Path, production: Production, *, have: int = 3, asks: int = 6, **settings: Any) -> c.RunSpec:
    """A data file of ``have`` samples, ``asks`` prompts."""
    root.mkdir(exist_ok=True)
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", h.samples(have)))
    file = h.write_lines(root / "asks.jsonl", [json.dumps({"input_ids": [7, i, 9]}) for i in range(asks)])
    values = {"samples": 9, "prompts": str(file), "concurrency": 3, "max_new_tokens": 8, "tries": 1, **settings}
    server = replace(spec.production, args=["--port", str(production.port)], port=production.port)
    return replace(spec, production=server, top_up=c.TopUpSettings(**values))


def top_up(spec: c.RunSpec, dry_run: bool = False) -> c.TopUpResult:
    return topup.run(spec, Namespace(dry_run=dry_run, failed=False))


def planned(spec: c.RunSpec) -> c.PlanResult:
    return plan.run(spec, Namespace(dry_run=False, failed=False))


def test_the_rest_is_made_and_planned_as_shards_of_its_own(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production)
    before = planned(spec)
    assert (before.valid, before.top_ups) == (3, 0)
    made = top_up(spec)
    assert (made.had, made.made, made.now, made.wanted) == (3, 6, 9, 9)
    after = planned(spec)
    assert (after.rows, after.valid, after.top_ups, after.todo) == (3, 9, 6, 9)
    assert [(s.id, s.name, s.todo) for s in after.shards] == [
        (0, "shard 00000 rows 0-2", 3),
        (50000, "shard 50000 rows 200000-200003", 4),
        (50001, "shard 50001 rows 200004-200005", 2),
    ]
    sample = read_input(ShardFiles(Path(after.dataset_dir), 50000)).sample(0)
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 1], "the answer is trained on, the prompt is not"
    assert sample.ids[:3].tolist()[::2] == [7, 9]
    asked = {tuple(a["input_ids"]): a["sampling_params"] for a in production.asked}
    assert all((p["temperature"], p["max_new_tokens"]) == (0.7, 8) for p in asked.values())
    assert len({p["sampling_seed"] for p in asked.values()}) == 6, "each request has a seed of its own"


def test_nothing_is_asked_where_enough_is_there_or_none_is_wanted(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production, samples=3)
    planned(spec)
    assert top_up(spec).made == 0
    assert top_up(replace(spec, top_up=None)).made == 0
    wanted = replace(spec, top_up=replace(spec.top_up, samples=5))  # type: ignore[type-var]
    assert top_up(wanted, dry_run=True).text == "2 more samples would be made"
    assert production.asked == []
    assert not (Path(planned(spec).dataset_dir) / "topup").exists()


def test_a_stopped_top_up_goes_on_and_asks_nothing_twice(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production)
    dataset = Path(planned(spec).dataset_dir)
    production.fail_after = 4
    with pytest.raises(TryAgain):
        top_up(spec)
    kept = topup.Ledger(dataset).lines()
    assert 1 <= len(kept) <= 4
    for name in ("samples.jsonl", "manifest.jsonl"):  # as a kill in the middle of a write leaves it
        with (dataset / "topup" / name).open("ab") as f:
            f.write(b'{"half')
    production.fail_after = 10**9
    asked = len(production.asked)
    assert top_up(spec).made == 6
    assert len(production.asked) - asked == 6 - len(kept)
    assert planned(spec).top_ups == 6
    lines = topup.Ledger(dataset).lines()
    assert len({(line.prompt, line.turn) for line in lines}) == len(lines)


def test_more_than_the_prompts_asks_again_and_only_with_a_temperature(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production, samples=14)
    planned(spec)
    assert top_up(spec).made == 11
    assert {line.turn for line in topup.Ledger(Path(planned(spec).dataset_dir)).lines()} == {0, 1}
    cold = spec_of(tmp_path / "cold", production, samples=14, temperature=0.0)
    planned(cold)
    with h.refuses(BadInput, "data.top_up.prompts", "used up", "5 samples are still missing"):
        top_up(cold)
    assert planned(cold).top_ups == 6, "what was made stays"


def test_empty_and_equal_answers_are_dropped(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production, have=3, asks=2, samples=5)
    planned(spec)
    answers = iter([[], [5, 6], [5, 6], [], [8]])
    production.answer = lambda body: next(answers, [9, len(production.asked)])
    spec = replace(spec, top_up=replace(spec.top_up, concurrency=1))  # type: ignore[type-var]
    made = top_up(spec)
    assert made.made == 2
    assert made.dropped >= 1
    assert planned(spec).top_ups == 2


def test_a_data_file_that_grows_meets_no_row_of_the_top_up(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production)
    planned(spec)
    top_up(spec)
    planned(spec)
    h.publish(spec)
    h.write_lines(tmp_path / "d.jsonl", h.samples(9))
    grown = planned(spec)
    assert (grown.rows, grown.valid, grown.done, grown.todo) == (9, 15, 9, 6)


def test_samples_that_are_not_the_manifests_are_refused(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production)
    dataset = Path(planned(spec).dataset_dir)
    top_up(spec)
    file = dataset / "topup/samples.jsonl"
    file.write_text(file.read_text().replace('"input_ids": [7', '"input_ids": [8', 1))
    with h.refuses(Refused, "topup/samples.jsonl", "another hash"):
        planned(spec)


def test_production_must_serve(tmp_path: Path, production: Production) -> None:
    spec = spec_of(tmp_path, production)
    planned(spec)
    production.server.shutdown()
    production.server.server_close()
    with pytest.raises(TryAgain, match="production does not serve"):
        top_up(spec)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{broken", "not JSON"),
        ('{"text": "x"}', "neither input_ids"),
        ('{"input_ids": ["a"]}', "no token ids"),
        ("[]", ""),
    ],
)
def test_bad_prompts_are_named_by_line(tmp_path: Path, text: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_tokenizer", lambda model: None)
    file = h.write_lines(tmp_path / "p.jsonl", ['{"input_ids": [1]}', text])
    with h.refuses(BadInput, "data.top_up.prompts", "line 2", word):
        list(prompts.read_prompts(file, "model", field="data.top_up.prompts", longest=9))
