"""One small tree of errors, mapped from the host program's exit codes and from what SSH can do wrong.

The message is made for the person who reads the red task: the field, its value, what is wrong, the fix.
"""

from __future__ import annotations

from hsx_host.contract import ErrorDoc


class HsxOperatorError(Exception):
    """Root of every error that an hsx operator raises by itself.

    :param message: what is wrong, one sentence.
    :param field: the setting, Param or host thing it belongs to.
    :param value: what stands there.
    :param fix: what to do.
    """

    #: How many retries the run's profile allows for this error; None leaves it to the task's ``retries``.
    allowed_retries: int | None = None

    def __init__(self, message: str, *, field: str = "", value: object = "", fix: str = "") -> None:
        self.message, self.field, self.value, self.fix = message, field, str(value)[:500], fix
        super().__init__(str(self))

    def __str__(self) -> str:
        where = (f"{self.field} = {self.value!r}: " if self.value else f"{self.field}: ") if self.field else ""
        return f"{where}{self.message}" + (f" ({self.fix})" if self.fix else "")


class ConfigError(HsxOperatorError):
    """A Param or a profile is wrong; a retry can't help."""


class ProfileError(ConfigError):
    """A profile that can't be used. ``problems`` has one line a problem, each with field, value and fix."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        head = f"{source}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([head, *(f"  - {p}" for p in problems)]))


class HostError(HsxOperatorError):
    """Something on the way to the host, or on it, went wrong."""


class HostUnreachable(HostError):
    """No SSH connection: the host is down, the network is, or the port is wrong. Tried again."""


class HostKeyMismatch(HostError):
    """The host shows another key than the connection names. Never tried again."""


class HostLoginRefused(HostError):
    """The host refuses the login. Never tried again."""


class HostLeftOut(HostError):
    """One of a profile's hosts that the plan could not reach or use; the others go on. Never tried again."""


class WrongHostPython(HostError):
    """``host.python`` of the profile isn't a usable Python. Never tried again."""


class HostGarbage(HostError):
    """The answer isn't one JSON document of the contract. Never tried again."""


class VerbFailed(HostError):
    """The host program ended with an ErrorDoc."""

    def __init__(self, verb: str, doc: ErrorDoc, detail: str = "") -> None:
        self.verb, self.count = verb, doc.count
        message = f"{verb}: {doc.message}" + (f"\n{detail}" if detail else "")
        super().__init__(message, field=doc.field, value=doc.value, fix=doc.fix)


class HostBadInput(VerbFailed):
    """Exit 2: input or configuration is wrong. Never tried again."""


class HostRefused(VerbFailed):
    """Exit 3: a safety check says no. Never tried again."""


class HostTryAgain(VerbFailed):
    """Exit 75: the host is held, the disk is full, a server died. Tried again."""


class HostHeld(HostTryAgain):
    """Exit 75 because another run holds the lease; ``value`` names it. Waited for."""


class HostBug(VerbFailed):
    """Any other exit code: the host program itself failed."""


class RemoteJobDied(HostError):
    """A detached verb is gone without an exit code: killed, out of memory, or the host was restarted."""


_BY_CODE: dict[int, type[VerbFailed]] = {2: HostBadInput, 3: HostRefused, 75: HostTryAgain}


def verb_error(verb: str, code: int, doc: ErrorDoc, detail: str = "") -> VerbFailed:
    """The error for exit ``code`` of ``verb``; ``detail`` is added where the program itself failed."""
    cls = HostHeld if code == 75 and doc.field == "lease" else _BY_CODE.get(code, HostBug)
    return cls(verb, doc, detail if cls is HostBug else "")


def named_error(name: str, message: str) -> HostError:
    """An error of this module from its class name and its text: a trigger can only hand on plain values."""
    cls = globals().get(name)
    if isinstance(cls, type) and issubclass(cls, VerbFailed):
        return cls("job", ErrorDoc(kind="again", message=message))
    if isinstance(cls, type) and issubclass(cls, HostError):
        return cls(message)
    return HostError(message)
