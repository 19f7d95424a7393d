"""`runs/launcher.json`: the address of the launcher of a runs folder, for the command line."""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.errors import ConfigError
from services.common.network_addresses import join_host_port, split_host_port
from services.common.tls import Tls, from_text

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
    if tls is not None:
        content["tls"] = tls.to_text()
    if listen:
        content["listen"] = listen
    path, draft = runs / _ADDRESS_FILE, runs / f".{_ADDRESS_FILE}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    draft.replace(path)
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
        content = json.loads(text)
        address, token, tls = str(content["address"]), str(content["token"]), content.get("tls")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{REMOTE_VARIABLE} is not the content of a launcher's runs/launcher.json"
        ) from None
    return LauncherAddress(
        address, token, 0, from_text(tls, where=REMOTE_VARIABLE) if tls else None, elsewhere=True
    )


def read_address(runs: Path) -> LauncherAddress | None:
    """Return the launcher of a runs folder; None if none runs. The file of a dead launcher is
    ignored.

    Raises ConfigError if its certificate has expired."""
    try:
        content = json.loads((runs / _ADDRESS_FILE).read_text())
        process = psutil.Process(content["pid"])
        alive = abs(process.create_time() - content["started"]) < 1.0
        zombie = process.status() == psutil.STATUS_ZOMBIE
    except (FileNotFoundError, psutil.NoSuchProcess, ValueError, KeyError):
        return None
    if not alive or zombie:
        return None
    text = content.get("tls")
    tls = from_text(text, where=str(runs / _ADDRESS_FILE)) if text else None
    return LauncherAddress(
        content["address"], content["token"], content["pid"], tls, listen=content.get("listen", "")
    )
