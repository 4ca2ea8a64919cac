"""For bench/gpu_borrow.py: the launched server gets a child that outlives it, ignores SIGTERM and holds device memory.

A stand-in for a scheduler that is reparented: SGLang's own schedulers end with their parent (PR_SET_PDEATHSIG) unless
they hang in the driver, which nobody can bring about on demand. BENCH_ORPHAN_MIB says how much; 0 holds none.
"""

import os
import subprocess
import sys

_CODE = """import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mib := int(sys.argv[1]):
    import torch
    held = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
time.sleep(86400)"""

if "sglang.launch_server" in sys.orig_argv and "BENCH_ORPHAN_MIB" in os.environ:
    # not by this environment: the child would find this file again
    _env = {k: v for k, v in os.environ.items() if k != "BENCH_ORPHAN_MIB"}
    subprocess.Popen([sys.executable, "-c", _CODE, os.environ["BENCH_ORPHAN_MIB"]], env=_env)
