"""Times the capture plugin's seams inside a scheduler: put this folder on the server's PYTHONPATH.

Where ``BENCH_HOOK_TIME`` names a file, the time that the scheduler's thread spends in the capture (``on_logits``, and
of it the wait for a free slot of the ring) and that the writers spend (waiting for the copy, checksum, write) is
summed and written to it every second, as one JSON document. Without the variable nothing happens.
"""

import json
import os
import sys
import threading
import time


def _main(file: str) -> None:
    while "hsx_capture.writer" not in sys.modules or "hsx_capture.collect" not in sys.modules:
        time.sleep(0.1)
    time.sleep(0.5)
    from hsx_capture import collect, ring, writer

    sums: dict[str, list[float]] = {}
    lock = threading.Lock()

    def timed(owner, name, label):
        inner = getattr(owner, name)

        def outer(*args, **kwargs):
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                with lock:
                    entry = sums.setdefault(label, [0, 0.0, 0.0])
                    entry[0] += 1
                    entry[1] += took
                    entry[2] = max(entry[2], took)

        setattr(owner, name, outer)

    timed(collect.Collector, "on_logits", "scheduler: on_logits")
    timed(collect.Collector, "_account", "scheduler: account (request documents)")
    timed(ring.Ring, "fill", "scheduler: fill (wait for a slot, gather, start the copy)")
    timed(ring.Ring, "_gather_and_copy", "scheduler: gather and start the copy")
    timed(ring.Slot, "wait", "writers: wait for the copy")
    timed(writer.Writers, "_write_block", "writers: write and checksum")
    timed(writer.Writers, "_answer", "writers: record")
    while True:
        time.sleep(1)
        with lock:
            facts = {k: {"calls": n, "s": round(s, 4), "most_ms": round(m * 1e3, 2)} for k, (n, s, m) in sums.items()}
            text = json.dumps(facts)
        temporary = f"{file}.{os.getpid()}"
        with open(temporary, "w") as f:
            f.write(text)
        os.replace(temporary, file)


if os.environ.get("BENCH_HOOK_TIME"):
    threading.Thread(target=_main, args=(os.environ["BENCH_HOOK_TIME"],), daemon=True).start()
