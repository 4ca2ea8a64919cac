"""How an SGLang server is launched: pure functions from settings to a command, an environment and a hash."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from hsx_host.contract import ServerSettings
from hsx_host.errors import BadInput, Refused

MODULE = "sglang.launch_server"
CAPTURE_VARIABLE = "HSX_CAPTURE_SPEC"

# One name for each flag that matters here, of SGLang's several spellings (0.5.11 to 0.5.23).
_ALIASES = {
    "--model": "--model-path",
    "--tp": "--tp-size",
    "--tensor-parallel-size": "--tp-size",
    "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
}
_DEFAULTS = {"--host": ("127.0.0.1",), "--port": ("30000",)}

# What a server may inherit from the shell that starts it, beside its profile's environment.
_KEEP = {"PATH", "HOME", "LANG", "LC_ALL", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LD_LIBRARY_PATH"}
_KEEP_PREFIXES = ("CUDA_", "NVIDIA_")


# Flags whose values no log shows.
_SECRET = re.compile(r"(api|secret|access|hf|auth)[-_]?key|token$|secret|password|passphrase", re.IGNORECASE)
_SHORTEST = 4  # a shorter value would take harmless words out of a log


def command(python: str, settings: ServerSettings) -> list[str]:
    """The command line of a server."""
    return [python, "-m", MODULE, *settings.args]


def clean_base(environ: Mapping[str, str]) -> dict[str, str]:
    """What a server inherits from an environment of hsx: never PYTHONPATH (the bundle's) and nothing of hsx."""
    return {k: v for k, v in environ.items() if k in _KEEP or k.startswith(_KEEP_PREFIXES)}


def environment(
    base: Mapping[str, str],
    settings: ServerSettings,
    variables: Mapping[str, str] | None = None,
    *,
    plugin_dir: str = "",
    capture_spec: str = "",
) -> dict[str, str]:
    """The whole environment of a server: the base, the profile's on top, and the capture plugin where one is named.

    :param variables: the profile's, those of its env_file included; without them, ``settings.env``.
    """
    own = settings.env if variables is None else variables
    env = {k: v for k, v in base.items() if not k.startswith("HSX_")} | dict(own)
    if plugin_dir:
        env["PYTHONPATH"] = ":".join(p for p in (plugin_dir, env.get("PYTHONPATH", "")) if p)
        env[CAPTURE_VARIABLE] = capture_spec
    return env


def launch_hash(python: str, settings: ServerSettings, plugin_id: str = "") -> str:
    """16 hex digits of all that makes a launch what it is: interpreter, arguments, profile environment, plugin."""
    body = [python, sorted(flags(settings.args).items()), sorted(settings.env.items()), plugin_id]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]


def flags(args: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """``--flag value ...`` and ``--flag=value`` as a mapping without order; SGLang's defaults for host and port."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for arg in args:
        if arg.startswith("-") and not _number(arg):
            name, equals, value = arg.partition("=")
            name = _ALIASES.get(name, name)
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), arg)
    return _DEFAULTS | found


def differences(running: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Flags in which two argument lists differ, each with both values; empty where they mean the same."""
    have, want = flags(running), flags(wanted)
    missing = object()
    return [
        f"{name}: runs with {_shown(have, name)}, the profile says {_shown(want, name)}"
        for name in sorted(have.keys() | want.keys())
        if have.get(name, missing) != want.get(name, missing)
    ]


def check_address(settings: ServerSettings, where: str) -> None:
    """BadInput where ``host`` and ``port`` do not say what the arguments say."""
    given = flags(settings.args)
    for name, value in (("host", settings.host), ("port", str(settings.port))):
        if given[f"--{name}"] != (value,):
            raise BadInput(
                f"the server's arguments say --{name} {' '.join(given[f'--{name}'])}",
                field=f"{where}.{name}",
                value=value,
                fix="give the same in both",
            )


def check_extraction(settings: ServerSettings) -> None:
    """Refused where captured rows would be wrong or incomplete, or where others could reach the server."""
    given = flags(settings.args)
    problems = [f"{f} is missing" for f in ("--disable-radix-cache", "--disable-cuda-graph") if f not in given]
    for name, values in given.items():
        value = " ".join(values)
        if name.startswith("--speculative-"):
            problems.append(f"{name}: speculative decoding truncates hidden states")
        elif name.startswith("--disaggregation-") and value not in ("", "null"):
            problems.append(f"{name} {value}: prefill and decode apart give wrong states")
        elif name == "--pp-size" and value != "1":
            problems.append(f"{name} {value}: no process sees all layers under pipeline parallelism")
        elif name == "--nnodes" and value != "1":
            problems.append(f"{name} {value}: the capture writes files of one host only")
        elif name.startswith("--cuda-graph-backend") and value != "disabled":
            problems.append(f"{name} {value}: it switches CUDA graphs on again")
        elif name == "--config":
            problems.append(f"{name} {value}: flags in a file can't be checked")
    if problems:
        raise Refused(
            "the extraction server would not give every row: " + "; ".join(problems),
            field="extraction.args",
            value=" ".join(shown(settings.args)),
            fix="change extraction.flags in the profile",
        )
    if not _loopback(settings.host):
        raise Refused(
            "an extraction server listens on loopback only",
            field="extraction.host",
            value=settings.host,
            fix="set it to 127.0.0.1",
        )


def check_bound(port: int, addresses: Iterable[str]) -> None:
    """Refused where an extraction server listens on more than loopback, whatever its arguments said."""
    if wrong := sorted(a for a in addresses if not _loopback(a)):
        raise Refused(
            f"the extraction server on port {port} can be reached from outside: it listens on {', '.join(wrong)}",
            field="extraction.host",
            value=", ".join(wrong),
            fix="set it to 127.0.0.1",
        )


def check_model(settings: ServerSettings, path: str) -> None:
    """Refused where the arguments name another model than the profile: its rows would count as this one's."""
    given = flags(settings.args).get("--model-path", (path,))
    if given != (path,):
        raise Refused(
            f"the server's arguments say --model-path {' '.join(given)}, the data set is of {path}",
            field="extraction.args",
            value=" ".join(shown(settings.args)),
            fix="take --model-path out of the flags, and set model.path in the profile",
        )


def is_secret(name: str) -> bool:
    """Whether the value of a flag or variable of this name is shown and kept nowhere."""
    return bool(_SECRET.search(name))


def shown(args: Sequence[str]) -> list[str]:
    """Arguments as they may stand in a log: the value of a flag that names a secret is left out."""
    told: list[str] = []
    hide = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        flag = arg.startswith("-") and not _number(arg)
        secret = flag and bool(_SECRET.search(name))
        told.append(f"{name}=***" if secret and equals else "***" if hide and not flag else arg)
        hide = secret and not equals
    return told


def without_secrets(text: str, settings: ServerSettings, variables: Mapping[str, str]) -> str:
    """A server's own words with its secrets left out: SGLang tells all of its arguments at its start.

    :param variables: the profile's and those of its env_file. Names say which of the profile's own values are secrets;
        of the file, which is there for secrets, all are.
    """
    given = [(name, value) for name, values in flags(settings.args).items() for value in values]
    told = {v for name, v in (*given, *settings.env.items()) if _SECRET.search(name)}
    told |= {v for name, v in variables.items() if settings.env.get(name) != v}
    for value in sorted((v for v in told if len(v) >= _SHORTEST), key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def headers(settings: ServerSettings) -> dict[str, str]:
    """What every request to the server bears: its key, where it asks for one."""
    key = api_key(settings)
    return {"Authorization": f"Bearer {key}"} if key else {}


def api_key(settings: ServerSettings) -> str:
    """The key that the server asks its clients for; "" where it asks for none."""
    return " ".join(flags(settings.args).get("--api-key", ()))


def processes_of(settings: ServerSettings) -> int:
    """How many scheduler processes a launch starts, each of which loads the plugin."""
    given = flags(settings.args)
    tensor, data = (int(given.get(f, ("1",))[0]) for f in ("--tp-size", "--dp-size"))
    return tensor if "--enable-dp-attention" in given else tensor * data


def url(settings: ServerSettings) -> str:
    """Where this host reaches the server."""
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _shown(given: Mapping[str, tuple[str, ...]], name: str) -> str:
    if given.get(name) and _SECRET.search(name):
        return "another value"
    return repr(" ".join(given[name])) if given.get(name) else "it" if name in given else "nothing"
