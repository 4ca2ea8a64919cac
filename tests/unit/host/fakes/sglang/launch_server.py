"""A stand-in for ``sglang.launch_server`` in unit tests of ownership, stopping and transitions: HTTP, no model.

It answers /health, /generate and /freeze_gc. Environment variables make it behave badly: FAKE_DIE (ends at once, and
tells its secrets), FAKE_DIE_ONCE=FILE (the first time only), FAKE_DIE_WHILE=FILE (while it is there), FAKE_DIE_AT=N
(ends at the Nth generation), FAKE_SILENT (never healthy), FAKE_NO_FREEZE (no /freeze_gc),
FAKE_SHM (a file in /dev/shm that it keeps open and leaves), FAKE_ORPHAN (a child that ignores SIGTERM),
FAKE_READY=error|none|old (how the capture plugin's report goes wrong). What a real server does is tested in
tests/system.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STUBBORN = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        self.answer(503 if "FAKE_SILENT" in os.environ else 200, b"")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/freeze_gc":
            print("garbage collection frozen", flush=True)
            self.answer(404 if "FAKE_NO_FREEZE" in os.environ else 200, b"")
            return
        Handler.asked += 1
        if Handler.asked == int(os.environ.get("FAKE_DIE_AT", "0")):
            os._exit(9)
        self.answer(200, json.dumps({"output_ids": [1], "meta_info": {"completion_tokens": 1}}).encode())

    def allowed(self):
        key = sys.argv[sys.argv.index("--api-key") + 1] if "--api-key" in sys.argv else ""
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def answer(self, code, body):
        if not self.allowed():
            code, body = 401, b""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def report():
    """What the capture plugin writes in each scheduler process."""
    told = json.loads(Path(os.environ["HSX_CAPTURE_SPEC"]).read_text())
    ready = {
        "type": "PluginReady", "version": 1, "plugin_id": told["plugin_id"], "pid": os.getpid(), "tp_rank": 0,
        "sglang": "0.0.1" if os.environ.get("FAKE_READY") == "old" else importlib.metadata.version("sglang"),
        "model_class": "Fake", "layers_to_capture": told["layers"], "num_blocks": told["num_blocks"],
        "hidden_size": told["hidden_size"], "norm_class": "RMSNorm", "norm_eps": 1e-5, "seams": {"a": "b"},
        "error": "no such seam" if os.environ.get("FAKE_READY") == "error" else "",
    }  # fmt: skip
    if os.environ.get("FAKE_READY") != "none":
        Path(told["spool"], f"ready-{os.getpid()}.json").write_text(json.dumps(ready))


def main(argv):
    print("the fake server starts", flush=True)
    if "FAKE_DIE" in os.environ:
        print("its arguments:", argv, {k: os.environ.get(k) for k in ("HF_TOKEN", "DB_PASSWORD")}, flush=True)
        sys.exit("the fake server dies: asked to")
    if os.path.exists(os.environ.get("FAKE_DIE_WHILE", "")):
        sys.exit("the fake server dies: it can't start for now")
    once = os.environ.get("FAKE_DIE_ONCE")
    if once and not os.path.exists(once):
        Path(once).touch()
        sys.exit("the fake server dies: the first time")
    if "HSX_CAPTURE_SPEC" in os.environ:
        report()
    if "FAKE_SHM" in os.environ:
        open(os.environ["FAKE_SHM"], "wb")  # noqa: SIM115
        globals()["kept"] = os.open(os.environ["FAKE_SHM"], os.O_RDWR)
    if "FAKE_ORPHAN" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        child.stdout.readline()
    host, port = (argv[argv.index(flag) + 1] for flag in ("--host", "--port"))
    ThreadingHTTPServer((host, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
