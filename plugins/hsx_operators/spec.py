"""From a profile and the Params of a run to one ``RunSpec``: pure, decided once, in ``plan``.

From a shell: ``python -m hsx_operators.spec --profile demo --set shards=0 > spec.json`` makes the file that
every verb of ``python -m hsx_host`` takes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from hsx_host import contract as c
from hsx_operators.errors import ConfigError, HsxOperatorError, ProfileError
from hsx_operators.profile import FORMATS, FlagValue, Profile, load_profile
from hsx_operators.trainers import training_settings

#: What a run may choose besides the profile; the DAG's Params have these names.
CHOICES = ("dataset", "shards", "output_root", "formats", "cleanup_policy", "benchmark")
PARAMS = ("profile", *CHOICES, "dry_run", "stop_after")
AS_PROFILE = "as in the profile"
#: The Param ``shards`` may be this word instead of numbers.
FAILED = "failed"

_BY_FIELD = {"model-path": "model.path", "model": "model.path", "host": "production.host", "port": "production.port"}
#: SGLang spells some flags in several ways; a replacement must meet the other spelling too.
_ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
}
_NO_PATH = re.compile(r"[\x00-\x1f]")


def build_spec(profile: Profile, name: str, params: Mapping[str, Any], run_id: str) -> c.RunSpec:
    """The frozen plan of one run.

    :param profile: the validated profile.
    :param name: its name.
    :param params: the run's Params (``PARAMS``); a missing one, "" or [] means "as in the profile".
    :param run_id: the run's name on the host (``host_run_id``), or any name from a shell.
    """
    check_known(params)
    p, path = profile, _path_param(params, "dataset") or profile.data.path
    data_name = p.data.name if p.data.name and path == p.data.path else _data_name(path)
    production_args = server_args(p)
    extraction_args = apply_flags(production_args, p.extraction.flags)
    check_extraction(extraction_args)
    extraction_port = p.extraction.port or p.production.port
    extraction_env = {k: v for k, v in {**p.production.env, **p.extraction.env}.items() if v is not None}
    grace, soak = p.production.stop_grace_s, p.production.soak_requests
    return c.RunSpec(
        run_id=run_id,
        profile=name,
        manager=p.production.manager,
        host=c.HostSettings(
            python=p.host.python,
            home=p.host.home,
            output_root=_path_param(params, "output_root") or p.host.output_root,
            old_state_roots=list(p.host.old_state_roots),
        ),
        production=c.ServerSettings(
            args=_address(production_args, p.production.host, p.production.port),
            env=dict(p.production.env),
            host=p.production.host,
            port=p.production.port,
            start_timeout_s=p.production.start_timeout_s,
            stop_grace_s=grace,
            soak_requests=soak,
            env_file=p.production.env_file,
        ),
        extraction=c.ServerSettings(
            args=_address(extraction_args, "127.0.0.1", extraction_port),
            env=extraction_env,
            host="127.0.0.1",
            port=extraction_port,
            start_timeout_s=p.extraction.start_timeout_s or p.production.start_timeout_s,
            stop_grace_s=grace,
            soak_requests=soak,
            env_file=p.production.env_file,
        ),
        model=c.ModelSettings(path=p.model.path, revision=p.model.revision),
        capture=c.CaptureSettings(
            layers=list(p.capture.layers),
            formats=_formats(params) or list(p.capture.formats),
            dtype=p.capture.dtype,
            writers=p.capture.writers,
            ring_bytes=p.capture.ring_bytes,
        ),
        data=c.DataSettings(
            **{**p.data.model_dump(exclude={"samples_wanted", "top_up"}), "path": path, "name": data_name},
            shards=parse_shards(params.get("shards") or ""),
        ),
        benchmark=c.BenchmarkSettings(
            enabled=_benchmark(params, p),
            tolerance=p.benchmark.tolerance,
            loads={k: c.BenchmarkLoad(**v.model_dump()) for k, v in p.benchmark.loads.items()},
        ),
        cleanup=c.CleanupSettings(policy=_policy(params, p), reserve_bytes=p.cleanup.reserve_bytes),
        lease_ttl_s=p.tasks.lease_ttl_s,
        service=c.ServiceSettings(
            unit=p.production.unit,
            systemctl=list(p.production.systemctl),
            start_command=list(p.production.start_command),
            stop_command=list(p.production.stop_command),
            pid_command=list(p.production.pid_command),
        ),
        top_up=top_up(p),
        training=training(p, production_args),
        page_command=list(p.alerts.host_command),
    )


def top_up(p: Profile) -> c.TopUpSettings | None:
    """None where the profile wants no more samples than the data file has."""
    if not p.data.samples_wanted or p.data.top_up is None:
        return None
    return c.TopUpSettings(samples=p.data.samples_wanted, tries=p.data.tries, **p.data.top_up.model_dump())


def training(p: Profile, production_args: list[str]) -> c.TrainingSettings | None:
    """The profile's training; the acceptance serves as production does, but for its own flags and port."""
    if p.training is None:
        return None
    wanted, python = p.training.acceptance, (p.training.host or p.host).python
    if wanted is None:
        return training_settings(p.training, python, None)
    server = c.ServerSettings(
        args=_address(apply_flags(production_args, wanted.flags), "127.0.0.1", wanted.port),
        env={k: v for k, v in {**p.production.env, **wanted.env}.items() if v is not None},
        host="127.0.0.1",
        port=wanted.port,
        start_timeout_s=p.production.start_timeout_s,
        stop_grace_s=p.production.stop_grace_s,
        soak_requests=0,
    )
    acceptance = c.AcceptanceSettings(
        server=server,
        prompts=wanted.prompts or "",
        **wanted.model_dump(exclude={"port", "prompts", "flags", "env"}),
    )
    return training_settings(p.training, python, acceptance)


# ------------------------------------------------------------------------------ server arguments


def server_args(profile: Profile) -> list[str]:
    """Production's arguments, split as a shell would, without model, host and port: those have fields of their own."""
    args: list[str] = []
    for i, item in enumerate(profile.production.args):
        try:
            words = shlex.split(item)
        except ValueError as e:
            raise ProfileError(
                "profile", [f"production.args[{i}] = {item!r}: {e} (close the quote, or escape it)"]
            ) from None
        for flag in (w[2:].partition("=")[0] for w in words if w.startswith("--")):
            if flag in _BY_FIELD:
                raise ProfileError(
                    "profile", [f"production.args[{i}] = {item!r}: --{flag} has a field (set {_BY_FIELD[flag]})"]
                )
        if words and not args and not words[0].startswith("--"):
            raise ProfileError(
                "profile", [f"production.args[{i}] = {item!r}: does not start with -- (name the flag first)"]
            )
        args += words
    return ["--model-path", profile.model.path, *args]


def _address(args: list[str], host: str, port: int) -> list[str]:
    return [*args, "--host", host, "--port", str(port)]


def groups(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """``["--tp-size", "8", "--trust-remote-code"]`` as ``[("tp-size", ["8"]), ("trust-remote-code", [])]``."""
    found: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--"):
            flag, eq, value = arg[2:].partition("=")
            found.append((_ALIASES.get(flag, flag), [value] if eq else []))
        else:
            found[-1][1].append(arg)
    return found


def apply_flags(args: Sequence[str], flags: Mapping[str, FlagValue]) -> list[str]:
    """Production's arguments with ``extraction.flags``: true adds a switch, a value replaces, null removes."""
    values: dict[str, list[str]] = dict(groups(args))
    for key, value in flags.items():
        flag, where = key.lstrip("-"), f"extraction.flags.{key}"
        flag = _ALIASES.get(flag, flag)
        if flag in _BY_FIELD:
            fix = {"port": "extraction.port", "host": "nothing: it is 127.0.0.1"}.get(flag, "model.path")
            raise ProfileError("profile", [f"{where} = {value!r}: --{flag} has a field (set {fix})"])
        if value is False:
            raise ProfileError("profile", [f"{where} = False: a switch is added or not (write null to remove it)"])
        if value is None:
            values.pop(flag, None)
        else:
            values[flag] = [] if value is True else [str(v) for v in (value if isinstance(value, list) else [value])]
    return [word for flag, words in values.items() for word in (f"--{flag}", *words)]


def check_extraction(args: Sequence[str]) -> None:
    """Refuse what would make rows wrong or lost: speculative decoding, split prefill and decode, pipeline stages,
    a radix cache (a cached prefix leaves no rows)."""
    problems, given = [], dict(groups(args))
    for flag, words in given.items():
        value = " ".join(words)
        if flag.startswith("speculative-"):
            why = "speculative decoding changes what a forward pass holds"
        elif flag.startswith("disaggregation-") and value not in ("", "null"):
            why = "prefill and decode on different servers can't be captured together"
        elif flag == "pp-size" and value != "1":
            why = "layers of other pipeline stages can't be seen"
        else:
            continue
        problems.append(f"extraction: --{flag} {value}: {why} (add `{flag}: null` to extraction.flags)")
    if "disable-radix-cache" not in given:
        problems.append(
            "extraction.flags.disable-radix-cache: is missing: a cached prefix leaves no rows "
            "(add `disable-radix-cache: true`)"
        )
    if problems:
        raise ProfileError("profile", problems)


# ------------------------------------------------------------------------------ Params


def check_known(params: Iterable[str]) -> None:
    """Refuse Params that nobody reads; Airflow itself lets them pass in silence."""
    for key in params:
        if key not in PARAMS:
            raise ConfigError("there is no such Param", field=key, fix=f"known: {', '.join(PARAMS)}")


def parse_shards(text: object) -> list[int]:
    """``"3,7-9"`` -> ``[3, 7, 8, 9]``; "" means all, ``failed`` those that ``plan --failed`` finds (here: all)."""
    if wants_failed(text):
        return []
    if not isinstance(text, str):
        raise ConfigError("expected a text such as 3,7-9", field="shards", value=text, fix="quote it")
    shards: set[int] = set()
    parts = [part for s in text.split(",") if (part := s.strip())]
    for part in parts or text.split():  # a lone comma is no wish for all
        m = re.fullmatch(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?", part)
        if not m or int(m[2] or m[1]) < int(m[1]):
            raise ConfigError(
                f"{part!r} is not a shard number or a rising range",
                field="shards",
                value=text,
                fix="write numbers and ranges, such as 3,7-9, or failed; leave it empty for all",
            )
        shards.update(range(int(m[1]), int(m[2] or m[1]) + 1))
    return sorted(shards)


def wants_failed(text: object) -> bool:
    """Whether the Param ``shards`` asks for those with failed samples."""
    return isinstance(text, str) and text.strip() == FAILED


def _path_param(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key) or ""
    if not isinstance(value, str):
        raise ConfigError("expected a path", field=key, value=value, fix="give an absolute path on the host")
    if value and (not value.startswith("/") or _NO_PATH.search(value)):
        raise ConfigError(
            "is not an absolute path",
            field=key,
            value=value,
            fix="give a path that starts with /, as it is on the host",
        )
    return value


def _formats(params: Mapping[str, Any]) -> list[str]:
    value = params.get("formats") or []
    if isinstance(value, str):
        value = [v.strip() for v in value.split(",")]
    for v in value:
        if v not in FORMATS:
            raise ConfigError("unknown format", field="formats", value=v, fix=f"known: {', '.join(FORMATS)}")
    return list(dict.fromkeys(value))


def _policy(params: Mapping[str, Any], profile: Profile) -> str:
    value = params.get("cleanup_policy") or AS_PROFILE
    if value not in (AS_PROFILE, "never", "ask", "auto"):
        raise ConfigError("unknown policy", field="cleanup_policy", value=value, fix="known: never, ask, auto")
    return profile.cleanup.policy if value == AS_PROFILE else str(value)


def _benchmark(params: Mapping[str, Any], profile: Profile) -> bool:
    value = params.get("benchmark") or AS_PROFILE
    if value not in (AS_PROFILE, "on", "off"):
        raise ConfigError("is neither on nor off", field="benchmark", value=value, fix=f"on, off or {AS_PROFILE}")
    enabled = profile.benchmark.enabled if value == AS_PROFILE else value == "on"
    if enabled and not profile.benchmark.loads:
        raise ConfigError(
            "the profile has no loads to measure",
            field="benchmark",
            value=value,
            fix="add benchmark.loads to the profile, or switch the benchmark off",
        )
    return enabled


def _data_name(path: str) -> str:
    """A data set's name is a part of its id: the file's name without its ending, or the folder's."""
    stem = re.sub(r"\.(jsonl?(\.gz|\.zst)?|parquet|arrow)$", "", PurePosixPath(path).name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "data"


# ------------------------------------------------------------------------------ from a shell


def main(argv: Sequence[str] | None = None) -> int:
    """Print the RunSpec of a profile as JSON; exit 2 with the reason where it can't be built."""
    parser = argparse.ArgumentParser(prog="python -m hsx_operators.spec", description=main.__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--run-id", default=f"shell-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=", ".join(CHOICES))
    options = parser.parse_args(argv)
    try:
        pairs = [item.partition("=") for item in options.set]
        if bad := [key for key, eq, _ in pairs if not eq]:
            raise ConfigError(
                "is not KEY=VALUE", field="--set", value=bad[0], fix=f"KEY is one of {', '.join(CHOICES)}"
            )
        params = {key: value for key, _, value in pairs}
        print(c.encode(build_spec(load_profile(options.profile), options.profile, params, options.run_id)))
    except HsxOperatorError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
