"""What paramiko raises while the host is talked to, as hsx's own errors: each names what to correct, and its type says
whether a retry can help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import paramiko

from hsx_host import contract as c
from hsx_operators.errors import (
    ConfigError,
    HostError,
    HostKeyMismatch,
    HostLoginRefused,
    HostTryAgain,
    HostUnreachable,
)


@contextlib.contextmanager
def ssh_errors(conn_id: str, where: str) -> Iterator[None]:
    """Of the connection: another host key, a refused login, nobody there."""
    try:
        yield
    except HostError:
        raise
    except paramiko.BadHostKeyException as e:
        raise HostKeyMismatch(
            f"{where} shows another host key ({e.key.get_name()}) than the connection names: is it the same machine?",
            field="host.ssh_conn_id",
            value=conn_id,
            fix="compare the host's key with its owner, then set host_key in the connection's extra",
        ) from None
    except paramiko.AuthenticationException as e:
        raise HostLoginRefused(
            f"{where} refuses the login: {e}",
            field="host.ssh_conn_id",
            value=conn_id,
            fix="correct the connection's login, password or private key",
        ) from None
    except (paramiko.SSHException, EOFError, OSError) as e:
        if "not found in known_hosts" in str(e):
            raise HostKeyMismatch(
                f"the host key of {where} is not known",
                field="host.ssh_conn_id",
                value=conn_id,
                fix="set host_key in the connection's extra",
            ) from None
        raise HostUnreachable(
            f"{where} can't be reached: {e or type(e).__name__}",
            field="host.ssh_conn_id",
            value=conn_id,
            fix="is the host up, and are host and port of the connection right?",
        ) from None


@contextlib.contextmanager
def file_errors(home: str) -> Iterator[None]:
    """Of files on the host: no right to write below ``home``, a broken connection, a full or read-only disk."""
    try:
        yield
    except PermissionError as e:
        raise ConfigError(
            f"the login may not write there: {e}",
            field="host.home",
            value=home,
            fix="give the folder to the connection's login, or set another home",
        ) from None
    except (EOFError, paramiko.SSHException) as e:
        raise HostUnreachable(f"the connection broke while files were sent: {e}") from None
    except OSError as e:
        raise HostTryAgain(
            "ship",
            c.ErrorDoc(
                kind="again",
                message=f"files can't be put on the host: {e}",
                field="host.home",
                value=home,
                fix="look for a full or read-only disk",
            ),
        ) from None
