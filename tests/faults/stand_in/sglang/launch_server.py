"""A stand-in for ``sglang.launch_server`` and the capture plugin in one: real HTTP, real files, made-up rows, no model.

It starts in half a second and can be held or broken at any moment, which a real server can't. It gives what the host
program checks: health, tokens, a row of every plane for each token (the same for the same token at the same place, so
that the probe holds), and a next token that follows from the last row. What a real SGLang does is tested elsewhere.

Files in the folder that ``FAULT_CONTROL`` names steer it while it runs; ``MODE`` is production or extraction:

    MODE-start     while it is there, /health answers 503
    MODE-die       holds a number: so many starts end at once (each takes one off)
    MODE-stop      while it is there, SIGTERM does not end the server
    capture-N      while it is there, the N-th captured request of shards and all later ones get no answer
    die-at         holds a number: the server ends with this captured request of shards

It has a child in its session, as a real server has its scheduler, and both keep a file in /dev/shm open.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CONTROL = Path(os.environ["FAULT_CONTROL"])
MODE = "extraction" if "HSX_CAPTURE_SPEC" in os.environ else "production"
COUNT = threading.Lock()
captured = 0


def held(name):
    return (CONTROL / name).exists()


def wait_while(name):
    while held(name):
        time.sleep(0.02)


class Rows:
    """Rows by token and place from one seeded table, in bf16; the head of the model gives the next token."""

    def __init__(self, told, model):
        import numpy as np
        from safetensors.numpy import load_file, save_file

        self.np, self.names = np, [f"layer_{k}" for k in told["layers"]] + ["final"]
        self.table = np.random.default_rng(7).standard_normal((509, told["hidden_size"])).astype("<f4")
        self.head = load_file(model / "model.safetensors")["lm_head.weight"]
        norm = {"weight": np.ones(told["hidden_size"], "<f4"), "eps": np.array([1e-5], "<f8")}
        save_file(norm, Path(told["spool"]) / "final_norm.safetensors")

    def planes(self, ids):
        """uint16 [tokens, hidden] (the bits of bf16) for each plane."""
        np = self.np
        at = (np.array(ids) * 31 + np.arange(len(ids)) * 7) % len(self.table)
        return [(self.table[at] * (1 + i)).view("<u4") >> 16 for i in range(len(self.names))]

    def next_token(self, final):
        """argmax of head times RMSNorm of the last row."""
        np = self.np
        row = (final[-1].astype("<u4") << 16).view("<f4")
        return int((self.head @ (row / np.sqrt((row * row).mean() + 1e-5))).argmax())


def capture(request, ids):
    """Fill the sample's file and write its record, as the plugin does; the answer to the client."""
    np, planes = ROWS.np, ROWS.planes(ids)
    record = {"rid": request["rid"], "rows": len(ids), "bytes": 0, "chunks": 1, "error": "", "planes": []}
    record["ids_crc32"] = zlib.crc32(np.array(ids, "<i8").tobytes())
    fd = os.open(request["path"], os.O_WRONLY)
    try:
        for plane, rows in zip(request["planes"], planes, strict=True):
            data = rows.astype("<u2").tobytes()
            size = len(data) // len(ids)
            for i in range(len(ids)):
                os.pwrite(fd, data[i * size : (i + 1) * size], plane["offset"] + i * plane["row_stride"])
            said = {"name": plane["name"], "crc32": zlib.crc32(data), "finite": True, "zero": False, "constant": False}
            record["planes"].append(said)
    except OSError as e:
        record["error"] = str(e)
    finally:
        os.close(fd)
    write(SPOOL / f"{request['rid']}.done.json", {"type": "CaptureRecord", "version": 1, **record})
    return ROWS.next_token(planes[-1])


def write(path, body):
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(body))
    temporary.replace(path)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(503 if held(f"{MODE}-start") else 200, {"chunked_prefill_size": 64})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token, ids = 1, body.get("input_ids") or [1]
        asked = SPOOL / f"{body.get('rid')}.json" if SPOOL and body.get("rid") else None
        if self.path == "/generate" and asked and asked.exists():
            request = json.loads(asked.read_text())
            if "/shard-" in request["path"]:
                self.count()
            token = capture(request, ids)
        meta = {"prompt_tokens": len(ids), "completion_tokens": 1, "cached_tokens": 0}
        self.answer(200, {"output_ids": [token], "meta_info": meta})

    def count(self):
        """One more captured request of a shard: held, or the server's last, where the control folder says so."""
        global captured
        with COUNT:
            captured += 1
            number = captured
        if held("die-at") and number >= int((CONTROL / "die-at").read_text()):
            os._exit(9)
        for hold in CONTROL.glob("capture-*"):
            if number >= int(hold.name.removeprefix("capture-")):
                wait_while(hold.name)

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def report(told):
    """What the capture plugin writes in each scheduler process."""
    ready = {
        "type": "PluginReady", "version": 1, "plugin_id": told["plugin_id"], "pid": os.getpid(), "tp_rank": 0,
        "sglang": importlib.metadata.version("sglang"), "model_class": "StandIn",
        "layers_to_capture": told["layers"],
        "num_blocks": told["num_blocks"], "hidden_size": told["hidden_size"], "norm_class": "RMSNorm",
        "norm_eps": 1e-5, "seams": {"stand-in": "no model"}, "error": "",
    }  # fmt: skip
    write(SPOOL / f"ready-{os.getpid()}.json", ready)


def end(number, frame):
    wait_while(f"{MODE}-stop")
    os._exit(0)


def main(argv):
    print(f"the stand-in starts as {MODE}", flush=True)
    deaths = CONTROL / f"{MODE}-die"
    if deaths.exists() and (left := int(deaths.read_text())):
        deaths.write_text(str(left - 1))
        sys.exit("the stand-in ends: it was told to")
    signal.signal(signal.SIGTERM, end)
    shm = Path("/dev/shm") / f"hsx-fault-{os.environ.get('FAULT_TOKEN', 'x')}-{os.getpid()}"
    fd = os.open(shm, os.O_CREAT | os.O_RDWR, 0o600)
    child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(86400)"], pass_fds=(fd,))
    print(f"its scheduler is pid {child.pid}", flush=True)
    global SPOOL, ROWS
    host, port, model = (argv[argv.index(flag) + 1] for flag in ("--host", "--port", "--model-path"))
    if MODE == "extraction":
        told = json.loads(Path(os.environ["HSX_CAPTURE_SPEC"]).read_text())
        SPOOL, ROWS = Path(told["spool"]), Rows(told, Path(model))
        report(told)
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


SPOOL = ROWS = None

if __name__ == "__main__":
    main(sys.argv[1:])
