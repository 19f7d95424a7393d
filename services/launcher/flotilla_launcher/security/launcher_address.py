"""`runs/launcher.json`: the address of the launcher of a runs folder, for the command line."""

import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port, split_host_port
from flotilla_common.rpc.tls import Tls, from_text
from flotilla_launcher.security.secret_files import write_secret

REMOTE_VARIABLE = "FLOTILLA_LAUNCHER"
_ADDRESS_FILE = "launcher.json"
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class LauncherAddress:
    """Address and process of a running launcher. `tls` is the client's, for a launcher that
    serves beyond loopback; `listen` is its --listen argument."""

    address: str
    token: str
    pid: int
    tls: Tls | None = None
    elsewhere: bool = False
    listen: str = ""
    # The launcher's working directory and interpreter, for commands that are run there.
    folder: str = ""
    python: str = ""

    @property
    def local_address(self) -> str:
        """Address for processes on the launcher's machine. The advertised address may lead
        through another machine or a firewall."""
        host, port = split_host_port(self.listen or self.address, "listen")
        # With port 0, only the address holds the actual port.
        return join_host_port(
            _LOOPBACK_OF_WILDCARD.get(host, host),
            port or split_host_port(self.address, "launcher")[1],
        )


@contextmanager
def published_address(
    runs: Path, address: str, token: str, tls: Tls | None = None, *, listen: str = ""
) -> Generator[None]:
    """Publish launcher.json, readable by its owner alone, while the launcher serves."""
    started = psutil.Process().create_time()
    content = {"address": address, "token": token, "pid": os.getpid(), "started": started}
    content |= {"folder": os.getcwd(), "python": sys.executable}
    if tls is not None:
        content["tls"] = tls.to_text()
    if listen:
        content["listen"] = listen
    path = runs / _ADDRESS_FILE
    write_secret(path, json.dumps(content).encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def address_from_environment() -> LauncherAddress | None:
    """Read the address of a remote launcher from FLOTILLA_LAUNCHER, which holds the content of
    its launcher.json.

    Raises ConfigError for anything else, without quoting it: it may hold secrets."""
    text = os.environ.get(REMOTE_VARIABLE, "").strip()
    if not text:
        return None
    try:
        return _parse_address(json.loads(text), where=REMOTE_VARIABLE, elsewhere=True)
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError):
        raise ConfigError(
            f"{REMOTE_VARIABLE} is not the content of a launcher's runs/launcher.json"
        ) from None


def read_address(runs: Path) -> LauncherAddress | None:
    """Return the launcher of a runs folder; None if none runs. The file of a dead launcher is
    ignored.

    Raises ConfigError if its certificate has expired."""
    path = runs / _ADDRESS_FILE
    try:
        content = json.loads(path.read_text())
        process = psutil.Process(content["pid"])
        alive = abs(process.create_time() - content["started"]) < 1.0
        zombie = process.status() == psutil.STATUS_ZOMBIE
    except (FileNotFoundError, psutil.NoSuchProcess, ValueError, KeyError):
        return None
    if not alive or zombie:
        return None
    return _parse_address(content, where=str(path))


def _parse_address(content: Any, *, where: str, elsewhere: bool = False) -> LauncherAddress:
    """Parse the content of a launcher.json. Raises ConfigError for a bad certificate."""
    address, token, text = str(content["address"]), str(content["token"]), content.get("tls")
    tls = from_text(text, where=where) if text else None
    pid, listen = (0, "") if elsewhere else (content["pid"], content.get("listen", ""))
    # Launchers of earlier versions do not name their folder.
    folder, python = str(content.get("folder", "")), str(content.get("python", ""))
    return LauncherAddress(address, token, pid, tls, elsewhere, listen, folder, python)
