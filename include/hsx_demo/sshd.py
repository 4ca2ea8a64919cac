"""A real OpenSSH server on the loopback interface, with throw-away keys, for the demo and the tests.

It is the borrowed host's door: the hook connects to it, verifies its host key and logs in with a key, as on a GPU
host. Everything it needs lies in one folder; nothing of the machine's own SSH is read or changed.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hsx_demo.errors import DemoError
from hsx_demo.processes import Child, start, stop, wait_until

SSHD_PLACES = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/usr/bin/sshd")


@dataclass(frozen=True)
class SshServer:
    """A running server. ``host_key`` is ``type base64`` of its public key; ``key_file`` the user's private key."""

    host: str
    port: int
    user: str
    key_file: str
    host_key: str
    log: str
    child: Child

    def connection(self, **overrides: object) -> str:
        """The Airflow connection as JSON, for ``AIRFLOW_CONN_<ID>``: key login, host key verified."""
        extra: dict[str, object] = {
            "key_file": self.key_file,
            "host_key": self.host_key,
            "no_host_key_check": False,
            "look_for_keys": False,
            "allow_host_key_change": False,
        }
        body: dict[str, object] = {
            "conn_type": "ssh",
            "host": self.host,
            "port": self.port,
            "login": self.user,
            "extra": extra,
        }
        extra.update({k: v for k, v in overrides.items() if k not in body})
        body.update({k: v for k, v in overrides.items() if k in body})
        return json.dumps(body)

    def to_json(self) -> dict[str, object]:
        """For the state file of ``make up``."""
        return asdict(self)

    def stop(self) -> None:
        """Ends the server and the sessions that it opened."""
        stop(self.child, grace_s=5.0)


def start_sshd(
    folder: Path, *, host: str = "127.0.0.1", port: int = 0, env: Mapping[str, str] | None = None
) -> SshServer:
    """Start a server that keeps its keys, configuration and log in ``folder``.

    :param folder: made where missing, mode 0700; keys found there are used again.
    :param port: 0 takes a free one.
    :param env: variables that every session gets (``SetEnv``).
    :raises DemoError: no sshd and no way to install one, or it did not come up; the log stands in the message.
    """
    binary = find_sshd()
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    host_file, user_file = folder / "host_key", folder / "user_key"
    for file in (host_file, user_file):
        if not file.exists():
            _keygen(file)
    authorized = folder / "authorized_keys"
    authorized.write_text(user_file.with_suffix(".pub").read_text())
    authorized.chmod(0o600)
    if os.geteuid() == 0:
        # sshd as root refuses to start without its privilege separation folder
        Path("/run/sshd").mkdir(mode=0o755, parents=True, exist_ok=True)
    port = port or free_port(host)
    config = folder / "sshd_config"
    config.write_text(sshd_config(folder, host=host, port=port, env=env or {}))
    log = folder / "sshd.log"
    # -D keeps it in the foreground and in the session that we gave it, -e sends its log to stderr
    child = start([binary, "-D", "-e", "-f", str(config)], log=log, name="sshd")
    try:
        wait_until(lambda: _banner(host, port), child, what="the SSH server", timeout_s=15.0)
    except DemoError:
        stop(child, grace_s=1.0)
        raise
    kind, key, *_ = host_file.with_suffix(".pub").read_text().split()
    return SshServer(
        host=host,
        port=port,
        user=getpass.getuser(),
        key_file=str(user_file),
        host_key=f"{kind} {key}",
        log=str(log),
        child=child,
    )


def sshd_config(folder: Path, *, host: str, port: int, env: Mapping[str, str]) -> str:
    """The configuration: loopback, one key, no passwords, as many sessions as a mapped task may want."""
    lines = [
        f"ListenAddress {host}",
        f"Port {port}",
        f"HostKey {folder / 'host_key'}",
        f"PidFile {folder / 'sshd.pid'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "PubkeyAuthentication yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "PermitRootLogin prohibit-password",
        "PermitUserEnvironment no",
        "PrintMotd no",
        "X11Forwarding no",
        "AllowTcpForwarding no",
        "MaxSessions 64",
        "MaxStartups 100:30:200",
        "LogLevel INFO",
        "Subsystem sftp internal-sftp",
    ]
    if env:
        lines.append("SetEnv " + " ".join(f'{k}="{v}"' for k, v in env.items()))
    return "\n".join(lines) + "\n"


def find_sshd() -> str:
    """The path of sshd; as root on Debian it is installed where missing."""
    found = _which_sshd()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "openssh-server"]):
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0 and command[1] == "install":
                raise DemoError(f"apt-get install openssh-server failed: {done.stderr.strip()[-400:]}")
        found = _which_sshd()
    if found is None:
        raise DemoError(
            "no sshd on this machine: install the package openssh-server (as root: apt-get install openssh-server)"
        )
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def _which_sshd() -> str | None:
    # sshd wants to be called by its absolute path: it starts itself again for each connection
    return next((p for p in SSHD_PLACES if os.access(p, os.X_OK)), None) or shutil.which("sshd")


def _keygen(path: Path) -> None:
    keygen = shutil.which("ssh-keygen")
    if keygen is None:
        raise DemoError("no ssh-keygen on this machine: install the package openssh-client")
    command = [keygen, "-q", "-t", "ed25519", "-N", "", "-C", "hsx-demo", "-f", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"ssh-keygen failed: {done.stderr.strip()}")


def _banner(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0) as s:
            s.settimeout(2.0)
            return s.recv(16).startswith(b"SSH-2.0")
    except OSError:
        return False
