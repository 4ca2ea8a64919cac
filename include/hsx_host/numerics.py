"""Which launch settings can change the rows, and so belong to what a data set is.

Whatever is not known to be harmless counts: a data set too many costs time, rows of two kinds in one are wrong.
Harmless is what moves a row by rounding at most (ranks, batches, chunks) and what only serves, logs or makes room.
Flags: SGLang 0.5.14 to 0.5.23, ``server_args.py``. Paths of the model may differ between hosts with equal rows; the
model itself counts by its config and weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from hsx_host import envfile, servers
from hsx_host.contract import ServerSettings

_HARMLESS_FLAGS = re.compile(
    r"""--(
    # the model's place, and what turns text into ids: samples are ids already
    model-path | tokenizer-(path|mode|backend|worker-num) | detokenizer-worker-num | skip-tokenizer-init | download-dir
    | (hf-)?chat-template(-name)? | completion-template | (default-chat-template-kwargs)
    | reasoning-parser | tool-call-parser | weight-loader-(disable-mmap|prefetch-.*|drop-cache-after-load)
    # where it listens, and what it tells
    | host | port | grpc-port | nccl-port | served-model-name | weight-version | ssl-.* | fastapi-root-path
    | log-.* | uvicorn-.* | .*metric.* | bucket-.* | (prompt|generation)-tokens-buckets | decode-log-interval
    | show-time-cost | crash-dump-folder | enable-request-time-stats-logging | enable-trace | trace-modules | otlp-.*
    | enable-cache-report | file-storage-path | kv-events-config | gc-.* | stream-.* | incremental-streaming-output
    # its start and its watch
    | (soft-)?watchdog-timeout | dist-timeout | sleep-on-idle | skip-server-warmup | warmups | pre-warm-nccl
    # memory, batches and their order
    | mem-fraction-static | cpu-offload-gb | max-(running|queued)-requests | max-total-tokens | max-prefill-tokens
    | chunked-prefill-size | prefill-max-requests | enable-mixed-chunk | schedule-.* | scheduler-recv-interval
    | num-continuous-decode-steps | disable-overlap-schedule | enable-memory-saver | (enable|disable)-priority-.*
    | disable-radix-cache | radix-eviction-policy | retraction-policy
    | (disable-)?cuda-graph(-.*)? | disable-(prefill|decode)-cuda-graph | disable-cuda-graph-padding
    # ranks and how they meet
    | (tp|dp|ep|attn-dp|moe-dp)-size | ep | expert-parallel-size | attention-data-parallel-size
    | moe-data-parallel-size | enable-dp-attention | enable-dp-lm-head | load-balance-method | nnodes | node-rank
    | dist-init-addr | nccl-init-addr | base-gpu-id | gpu-id-step | numa-node | disable-custom-all-reduce
    | enable-p2p-check | pp-size
    # what follows the forward pass
    | random-seed | sampling-(backend|defaults) | preferred-sampling-params | grammar-backend | constrained-json-.*
    | enable-return-hidden-states | disaggregation-mode
    )""",
    re.VERBOSE,
)
_HARMLESS_VARIABLES = re.compile(
    r"HSX_.*|NCCL_.*|GLOO_.*|OMP_.*|GOMP_.*|KMP_.*|HF_.*|HUGGINGFACE_.*|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|HOME|PATH|LAUNCH_BLOCKING|CACHE_.*|MODULE_LOADING)"
    r"|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_.*|TZ|TMPDIR|XDG_.*"
    r"|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|FAULTHANDLER)|PROMETHEUS_.*|OTEL_.*|\w*_PROXY|PYTORCH_\w*ALLOC_CONF"
    r"|\w*_(DIR|LOG|LOGS|LOGGING|LOG_LEVEL|PORT|TIMEOUT|TIMEOUT_S|VERBOSE)",
    re.IGNORECASE,
)

# Of an env_file, which is for secrets, only what an engine reads.
_ENGINE_VARIABLES = re.compile(
    r"(SGLANG|SGL|TORCH\w*|PYTORCH|ATEN|CUBLAS\w*|CUDNN|CUDA|NVIDIA|TRITON|FLASHINFER|DG|MKL|HIP|ROCM|AITER|VLLM)_\w+"
)


def of(settings: ServerSettings) -> dict[str, str]:
    """The flags (``--kv-cache-dtype``) and profile variables that can change rows, each with its value; no secrets.

    Of the engine's variables in ``env_file`` the first 12 hex digits of the value's SHA-256.
    """
    given = {name: " ".join(values) for name, values in servers.flags(settings.args).items()}
    found = {name: value for name, value in given.items() if not _HARMLESS_FLAGS.fullmatch(name)}
    found |= {name: value for name, value in settings.env.items() if not _HARMLESS_VARIABLES.fullmatch(name)}
    for name, value in envfile.variables(settings).items():
        if name not in settings.env or value != settings.env[name]:
            found.pop(name, None)
            if _ENGINE_VARIABLES.fullmatch(name) and not _HARMLESS_VARIABLES.fullmatch(name):
                found[name] = f"sha256 {hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return {name: value for name, value in sorted(found.items()) if not servers.is_secret(name)}


def difference(there: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first name of two such mappings with another value, and both as words; None where they are equal."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return name, *(repr(one[name]) if name in one else "not given" for one in (there, here))  # type: ignore[return-value]
    return None
