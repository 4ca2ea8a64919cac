"""The four ways in which a verb ends badly, with the exit codes of the contract."""

from __future__ import annotations

from hsx_host.contract import ErrorDoc

OK, BAD_INPUT, REFUSED, AGAIN, BUG = 0, 2, 3, 75, 1


class HsxError(Exception):
    """An error that a person can act on: the field, its value and the fix stand in the message.

    :param message: what is wrong, one sentence.
    :param field: the setting or input it belongs to, as the profile spells it.
    :param value: what stands there.
    :param fix: what to do.
    :param count: how many samples failed, where they are what is wrong.
    """

    kind = "bug"
    code = BUG

    def __init__(self, message: str, *, field: str = "", value: object = "", fix: str = "", count: int = 0) -> None:
        super().__init__(message)
        self.doc = ErrorDoc(kind=self.kind, message=message, field=field, value=str(value)[:500], fix=fix, count=count)

    def __str__(self) -> str:
        d = self.doc
        where = f"{d.field} = {d.value!r}: " if d.field else ""
        return f"{where}{d.message}" + (f" ({d.fix})" if d.fix else "")


class BadInput(HsxError):
    """Input or configuration is wrong; a retry can't help. Exit 2."""

    kind, code = "bad_input", BAD_INPUT


class Refused(HsxError):
    """A safety check says no; a retry can't help. Exit 3."""

    kind, code = "refused", REFUSED


class TryAgain(HsxError):
    """Nothing is wrong with the input: the host is held, the disk is full, a server died. Exit 75."""

    kind, code = "again", AGAIN
