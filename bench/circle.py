"""The whole circle: on-policy samples, extraction, EAGLE-3 training, serving with the drafter, and three controls.

    python bench/circle.py --model DIR --work DIR --trainer-python PYTHON [--device cuda] [--samples 2000]

Run under the Python that has SGLang; ``--trainer-python`` is the one with speculators 0.7. It drives hsx's own verbs as
the DAG does: production up, ``plan``, ``top-up``, ``plan``, ``acquire``, ``serve extraction``, ``probe``, ``extract``,
``verify``, ``handoff``, ``train``, ``acceptance``. Then the controls, with the same training:

- ``layers off by one``: the right drafter, served with the layers one deeper than it was trained on.
- ``after-norm``: trained on final hidden states that were normed once more.
- ``shuffled rows``: trained on hidden states whose rows are in another order than the tokens.

For each fault ``verify --reference`` is asked first whether it finds it, on a copy of the data set that has it,
checksums and all made right again. ``table.json`` and ``table.md`` in the work folder are the result; a step that is
done is not done again when the script is started anew. On a GPU trainings run beside each other, and so do the servers:
their acceptance lengths count, their speeds don't; ``--one-by-one`` is for those.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "include"), str(ROOT / "bench"), str(ROOT / "tests/system")]

import circle_prompts  # noqa: E402
import faulty_sets  # noqa: E402
from circle_spec import make_spec, moved  # noqa: E402

from hsx_host import acceptance, drafter, state, trainers, training_check  # noqa: E402
from hsx_host import contract as c  # noqa: E402


def main() -> int:
    """All steps in order; 0 where the table is written."""
    args = arguments().parse_args()
    args.work, args.model = args.work.resolve(), args.model.resolve()  # servers run in a folder of their own
    args.work.mkdir(parents=True, exist_ok=True)
    circle = Circle(args)
    circle.data()
    circle.train()
    circle.serve()
    print(circle.table())
    return 0


def arguments() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="a chat model's folder")
    p.add_argument("--work", type=Path, required=True, help="all output lies here")
    p.add_argument("--trainer-python", required=True, help="the Python that has speculators")
    p.add_argument("--trainer-path", default="", help="PYTHONPATH of the training, where nothing is installed")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--prompts", choices=["chat", "ids"], default="chat", help="ids: random, for a model without words")
    p.add_argument("--samples", type=int, default=2000)
    p.add_argument("--held-out", type=int, default=40)
    p.add_argument("--answer", type=int, default=128, help="most tokens of an answer")
    p.add_argument("--layers", type=int, nargs=3, default=[2, 15, 27])
    p.add_argument("--concurrency", type=int, default=32)
    p.add_argument("--temperature", type=float, default=0.0, help="of the top-up; served acceptance is greedy")
    p.add_argument("--steps", type=int, default=3, help="draft tokens in a chain")
    p.add_argument("--port", type=int, default=30990)
    p.add_argument("--server-args", default="", help="more flags for every server, separated by spaces")
    p.add_argument("--one-by-one", action="store_true", help="no two servers or trainings at once (always on a CPU)")
    p.add_argument("--controls", nargs="*", default=["layers", "norm", "rows"], choices=["layers", "norm", "rows"])
    p.add_argument("--train-args", default="--draft-vocab-size 8192 --epochs 20 --lr 1e-3 --total-seq-len 4096")
    return p


class Circle:
    """The work folder, its spec and its steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work
        self.at_once = 1 if args.device == "cpu" or args.one_by_one else 5
        self.times: dict[str, float] = {}
        self.prompt_files()
        self.spec = make_spec(args)
        self.spec_file = self.work / "spec.json"
        self.spec_file.write_text(c.encode(self.spec))

    def prompt_files(self) -> None:
        """Prompts to train on and held out, and the few samples that the data file begins with."""
        count = self.args.samples * 5 // 4 + 8, self.args.held_out
        if self.args.prompts == "ids":  # a model that knows no language
            vocabulary = json.loads((self.args.model / "config.json").read_text())["vocab_size"]
            made = circle_prompts.random_ids(*count, vocabulary)
        else:
            made = tuple([{"messages": [{"role": "user", "content": text}]} for text in part]
                         for part in circle_prompts.prompts(*count))  # fmt: skip
        for name, prompts in zip(("train.jsonl", "held_out.jsonl"), made, strict=True):
            (self.work / name).write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        ids = [list(range(5, 5 + n)) for n in (9, 12)]
        seeds = [json.dumps({"input_ids": i, "loss_mask": [0] * (len(i) - 1) + [1]}) for i in ids]
        (self.work / "seed.jsonl").write_text("\n".join(seeds) + "\n")

    def verb(self, verb: str, *args: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """One verb to its end, its progress on our stderr; the document it answers with."""
        began = time.monotonic()
        say(f"hsx_host {verb} {' '.join(args)}")
        done = subprocess.run(
            [sys.executable, "-m", "hsx_host", verb, "--spec", str(self.spec_file), *args],
            env=program(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.times[f"{verb} {' '.join(args)}".strip()] = round(time.monotonic() - began, 1)
        if done.returncode not in ok:
            raise SystemExit(f"{verb} ended with {done.returncode}: {done.stdout}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    # ------------------------------------------------------------------ the steps

    def data(self) -> None:
        """Top-up by production, extraction, proof, hand-off; the host is given back with nothing running."""
        if (self.work / "handoff-path").exists():
            return
        try:
            self.verb("serve", "production")
            self.verb("plan")
            self.kept("top-up", self.verb("top-up"))
            planned = self.verb("plan")
            self.verb("acquire")
            self.verb("serve", "extraction")
            self.kept("probe", self.verb("probe"))
            for shard in planned["shards"]:
                self.kept(f"extract-{shard['id']}", self.verb("extract", "--shard", str(shard["id"])))
            self.kept("verify", self.verb("verify", "--deep", "--reference", "4"))
            handoff = self.verb("handoff")
        finally:
            self.verb("acquire", ok=(0, 75))
            self.verb("serve", "stopped", ok=(0, 75))
            self.verb("release", "--abandon", ok=(0, 75))
        (self.work / "handoff-path").write_text(handoff["path"])

    def kept(self, name: str, document: dict[str, Any]) -> None:
        """A step's answer beside the table."""
        (self.work / f"{name}.json").write_text(json.dumps(document, indent=1))

    @property
    def handoff(self) -> c.HandoffResult:
        return training_check.read(self.spec, (self.work / "handoff-path").read_text())

    def train(self) -> None:
        """The right drafter by the verb; the controls by its command on damaged copies, which verify sees first."""
        with ThreadPoolExecutor(self.at_once) as pool:
            for done in [pool.submit(self.train_right), *(pool.submit(self.control, n) for n in self.args.controls)]:
                done.result()

    def train_right(self) -> None:
        if not (self.work / "train.json").exists():
            self.kept("train", self.verb("train", "--handoff", self.handoff.path))

    def control(self, name: str) -> None:
        """A copy with the fault, what verify says of it, and the drafter that learns from it."""
        copy = self.work / "faults" / name
        if not (self.work / f"fault-{name}.json").exists():
            say(f"a copy of the data set with the fault: {faulty_sets.TEXT[name]}")
            shutil.rmtree(copy, ignore_errors=True)
            faulty_sets.damage(copy / "output", name, self.spec)
            self.kept(f"fault-{name}", self.ask_verify(copy))
        if name != "layers":
            self.train_control(name, copy)

    def ask_verify(self, copy: Path) -> dict[str, Any]:
        """What ``verify`` says of a damaged copy: its exit code and the problems of its report."""
        spec = replace(
            self.spec, host=replace(self.spec.host, output_root=str(copy / "output"), home=str(copy / "home"))
        )
        file = copy / "spec.json"
        file.write_text(c.encode(spec))
        done = subprocess.run(
            [sys.executable, "-m", "hsx_host", "verify", "--deep", "--reference", "4", "--spec", str(file)],
            env=program(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        report = state.read_document(c.VerifyReport, state.run_dir(spec) / "verify.json")
        return {"code": done.returncode, "problems": report.problems if report else [done.stdout]}

    def train_control(self, name: str, copy: Path) -> None:
        """The right training's command, with the copy's data and checkpoints of its own."""
        save = self.work / "drafters" / f"control-{name}"
        if (save / "trained").exists():
            return
        settings, (dataset,) = self.spec.training, (copy / "output").iterdir()
        assert settings is not None
        words = trainers.places(settings, self.handoff, str(dataset / "v1")) | {"checkpoints": [str(save)]}
        command = trainers.fill(settings.command, words, "training.command")
        say(f"training on the copy: {' '.join(command)}")
        save.mkdir(parents=True, exist_ok=True)
        with (save / "log").open("w") as log:
            subprocess.run(command, env={**os.environ, **settings.env}, stdout=log, stderr=log, check=True)
        (save / "trained").touch()

    def serve(self) -> None:
        """The target alone once, then with each drafter, under the same held-out prompts."""
        settings = self.spec.training.acceptance if self.spec.training else None
        assert settings is not None
        chosen = acceptance.choose_prompts(self.spec, settings, self.handoff)
        folder = self.work / "served"
        folder.mkdir(exist_ok=True)
        right = Path(json.loads((self.work / "train.json").read_text())["drafter"])
        made = {"right": drafter.make_servable(right, folder / "right", self.handoff)}
        for name in self.args.controls:
            if name == "layers":
                made[name] = one_deeper(made["right"], folder / name)
            else:
                found = drafter.newest_checkpoint(self.work / "drafters" / f"control-{name}")
                assert found is not None, name
                made[name] = drafter.make_servable(found, folder / name, self.handoff)
        todo = {name: where for name, where in made.items() if not (self.work / f"acceptance-{name}.json").exists()}
        if not todo:
            return

        def answers(number: int, what: str, asked: c.AcceptanceSettings) -> list[acceptance.Answer]:
            return acceptance.serve_and_ask(sys.executable, moved(asked, number), chosen, what, folder)

        with ThreadPoolExecutor(self.at_once) as pool:
            alone = pool.submit(answers, 0, "alone", settings)
            served = [
                pool.submit(answers, number, f"with {name}", acceptance.with_drafter(settings, where))
                for number, (name, where) in enumerate(todo.items(), start=1)
            ]
            for (name, where), drafted in zip(todo.items(), served, strict=True):
                result = acceptance.compare(settings, str(where), chosen, alone.result(), drafted.result())
                say(f"{name}: {result.text}")
                self.kept(f"acceptance-{name}", asdict(result))

    def verdict(self, name: str) -> str:
        """What verify said of the data: the problem that names the fault, or the first where none does."""
        file = self.work / f"fault-{name}.json"
        if not file.exists():
            return "green"
        found = json.loads(file.read_text())
        named = [p for p in found["problems"] if faulty_sets.NAMED[name] in p]
        return f"exit {found['code']}: {named[0]}" if named else f"**not named**: {found['problems']}"

    def table(self) -> str:
        """``table.json`` and ``table.md``."""
        rows = []
        for name in ["right", *self.args.controls]:
            found = json.loads((self.work / f"acceptance-{name}.json").read_text())
            rows.append(
                {
                    "drafter": faulty_sets.TEXT.get(name, "right"),
                    "acceptance_length": found["drafted"]["acceptance_length"],
                    "tok_s": found["drafted"]["output_tok_s"],
                    "tok_s_alone": found["alone"]["output_tok_s"],
                    "same_output": f"{found['drafted']['same_output']} of {found['samples']}",
                    "verify": self.verdict(name),
                }
            )
        text = "| drafter | acceptance length | tok/s | alone | same output | verify of its data |\n"
        text += "|---|---|---|---|---|---|\n"
        text += "".join("| " + " | ".join(str(v) for v in row.values()) + " |\n" for row in rows)
        (self.work / "table.json").write_text(json.dumps({"rows": rows, "seconds": self.times}, indent=1))
        (self.work / "table.md").write_text(text)
        return text


def one_deeper(served: Path, out: Path) -> Path:
    """The same drafter with the layers that feed it one deeper than it was trained on."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(served, out, symlinks=True)
    config = json.loads((out / "config.json").read_text())
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [k + 1 for k in ids]
    (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def program() -> dict[str, str]:
    """The environment of a verb: hsx's own rooms before what is there."""
    path = [str(ROOT / "include"), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def say(text: str) -> None:
    """One line with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
