"""Times the schedulers of a benchmark's servers, and the capture in one of them: put this folder on their PYTHONPATH.

Where ``BENCH_HOOK_TIME`` names a folder, each scheduler sums the time that its own thread spends in launching a
forward pass and of it in the capture (``on_logits``), counts how often the device had run dry by then, and sums what
the writers do and what full garbage collections take. One JSON document a scheduler, written anew every second.
Without the variable nothing happens.
"""

import gc
import json
import os
import sys
import threading
import time


def _main(folder: str) -> None:
    while "sglang.srt.model_executor.model_runner" not in sys.modules:
        time.sleep(0.1)
    time.sleep(1)
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    sums: dict[str, list[float]] = {}
    lock = threading.Lock()

    def add(label, took):
        with lock:
            entry = sums.setdefault(label, [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += took
            entry[2] = max(entry[2], took)

    def timed(owner, name, label, dry=""):
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            if dry and torch.cuda.is_initialized() and torch.cuda.current_stream().query():
                add(dry, 0.0)
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                add(label, time.perf_counter() - began)

        setattr(owner, name, outer)

    began = [0.0]

    def collected(phase, info):
        if info["generation"] < 2:
            return
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            add("full garbage collections", time.perf_counter() - began[0])

    gc.callbacks.append(collected)
    timed(ModelRunner, "forward", "scheduler: launch a forward pass", "device dry before the launch")
    captured = False
    while True:
        time.sleep(1)
        if not captured and "hsx_capture.writer" in sys.modules and "hsx_capture.collect" in sys.modules:
            from hsx_capture import collect, ring, writer

            timed(collect.Collector, "on_logits", "scheduler: on_logits", "device dry before on_logits")
            timed(collect.Collector, "_account", "scheduler: account (request documents)")
            timed(ring.Ring, "fill", "scheduler: fill (wait for a slot, gather, start the copy)")
            timed(ring.Ring, "_gather_and_copy", "scheduler: gather and start the copy")
            timed(ring.Slot, "wait", "writers: wait for the copy")
            timed(writer.Writers, "_write_block", "writers: write and checksum")
            timed(writer.Writers, "_answer", "writers: record")
            captured = True
        with lock:
            facts = {k: {"calls": n, "s": round(s, 4), "most_ms": round(m * 1e3, 2)} for k, (n, s, m) in sums.items()}
        if facts:
            path = os.path.join(folder, f"{'extraction' if captured else 'plain'}-{os.getpid()}")
            with open(path, "w") as f:
                json.dump(facts, f)


if os.environ.get("BENCH_HOOK_TIME"):
    os.makedirs(os.environ["BENCH_HOOK_TIME"], exist_ok=True)
    threading.Thread(target=_main, args=(os.environ["BENCH_HOOK_TIME"],), daemon=True).start()
