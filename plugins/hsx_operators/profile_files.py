"""The files of profiles: which there are, which is the usual one, their YAML, and variables of the environment in it.

``${VAR}`` and ``${VAR:-default}`` are taken from the environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hsx_operators import INCLUDE
from hsx_operators.errors import ProfileError

_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the DAG file reads every profile when it is parsed


def profile_folders() -> list[Path]:
    """``$HSX_PROFILES`` first (its profiles win), then the shipped ones."""
    own = os.environ.get("HSX_PROFILES", "")
    return [*([Path(own)] if own else []), INCLUDE / "profiles"]


#: A profile's name is a part of its DAG's id, which Airflow bounds at 250 characters.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def list_profiles() -> list[str]:
    """Names of all profiles that exist, a person's own first."""
    return [name for name in _stems() if _NAME.fullmatch(name)]


def _stems() -> list[str]:
    names = [f.stem for folder in profile_folders() for f in sorted(folder.glob("*.yaml"))]
    return list(dict.fromkeys(names))


def remarks() -> list[str]:
    """What is wrong around the profiles and would pass in silence: ``$HSX_PROFILE`` names none, or a file's name is no
    profile's. Hidden files, such as an editor's locks, are nobody's profile."""
    names, lines = list_profiles(), []
    if (chosen := os.environ.get("HSX_PROFILE", "")) and chosen not in names:
        near = difflib.get_close_matches(chosen, names, n=1)
        fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
        lines.append(f"HSX_PROFILE = {chosen!r}: there is no such profile ({fix})")
    for stem in _stems():
        if not _NAME.fullmatch(stem) and not stem.startswith("."):
            fix = "use at most 200 letters, digits, ., _ and -"
            lines.append(f"file name = {stem + '.yaml'!a}: is no profile's name, and is left out ({fix})")
    return lines


def profile_file(name: str) -> Path:
    """The file of a profile; ProfileError that lists the known names where there is none."""
    if _NAME.fullmatch(name):
        for folder in profile_folders():
            if (folder / f"{name}.yaml").is_file():
                return folder / f"{name}.yaml"
    known = ", ".join(list_profiles()) or "none"
    raise ProfileError("profile", [f"profile = {name!r}: there is no such profile (known: {known})"])


def default_profile(among: Sequence[str] = ()) -> str:
    """``$HSX_PROFILE``, else the first whose variables are all set: a person's own, the demo, then the others.

    :param among: those that may be; all by default.

    A misspelt ``$HSX_PROFILE`` stays as it is: whoever uses it is told so, and gets no other host instead.
    """
    if chosen := os.environ.get("HSX_PROFILE", ""):
        return chosen
    names = list(among) or list_profiles()
    shipped = {f.stem for f in (INCLUDE / "profiles").glob("*.yaml")}
    for name in sorted(names, key=lambda n: (n in shipped, n != "demo")):
        try:
            text = profile_file(name).read_text(encoding="utf-8")
        except (ProfileError, OSError, ValueError):
            continue
        needed = {m[1] for m in _VARIABLE.finditer(text) if m[2] is None}
        if needed <= set(os.environ):
            return name
    return names[0]


_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def _expand(value: Any, where: str, undefined: dict[str, list[str]]) -> Any:
    if isinstance(value, dict):
        return {k: _expand(v, f"{where}.{k}" if where else str(k), undefined) for k, v in value.items()}
    if isinstance(value, list):
        return [_expand(v, f"{where}[{i}]", undefined) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(m: re.Match[str]) -> str:
        found = os.environ.get(m[1])
        if found:
            return found
        if m[2] is not None:
            return m[2]
        undefined.setdefault(where, []).append(m[1])
        return m[0]

    return _VARIABLE.sub(replace, value)


def expanded(body: Any) -> tuple[Any, dict[str, list[str]]]:
    """A document with its variables replaced, and by field the variables that are not set."""
    undefined: dict[str, list[str]] = {}
    return _expand(body, "", undefined), undefined


def read_body(name: str) -> Any:
    """The YAML document of a profile, as it stands there."""
    file = profile_file(name)
    source = f"profile {name} ({file})"
    try:
        body = yaml.load(file.read_text(encoding="utf-8"), _YAML)
        expanded(body)  # an alias may hold itself
    except OSError as e:
        raise ProfileError(source, [f"can't be read: {e.strerror or e} (look at its mode)"]) from None
    except RecursionError:
        raise ProfileError(source, ["an alias holds itself, or it is nested too deep (write it out)"]) from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: a date that is none, a number of 5,000 digits
        raise ProfileError(source, [f"not YAML: {' '.join(str(e).split())}"]) from None
    return body
