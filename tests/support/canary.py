"""One value for every secret that a launcher may have, and a search for each of them."""

import base64
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

# Read under a name that does not mark it as a secret.
HOOK = "TRAINING_PINGS"
PLAIN = (
    *("FLEET_API_KEY", "WANDB_API_KEY", "HF_TOKEN", "SLACK_BOT_TOKEN", "FLOTILLA_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY"),
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME"),
    *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    *("NEBIUS_TENANT_ID", "TINKER_API_KEY"),
)
# An option of a store, in the middle of other text.
REMOTE_OPTIONS, REMOTE_LAUNCHER = "FLOTILLA_REMOTE_OPTIONS", "FLOTILLA_LAUNCHER"
NEBIUS = "NEBIUS_CREDENTIALS_JSON"
# Made by the launcher, and readable by their owner alone.
KEPT = (".identity", "launcher.json")


class Canaries:
    """The secrets by name, and the environment that holds them."""

    def __init__(self) -> None:
        objects = (HOOK, REMOTE_OPTIONS, REMOTE_LAUNCHER, NEBIUS)
        self.values = {name: _canary(name) for name in (*PLAIN, *objects)}

    def environ(self, hook: str) -> dict[str, str]:
        """Return the variables; `hook` is the address that run notifications go to."""
        options = {"password": self.values[REMOTE_OPTIONS], "client_kwargs": {}}
        elsewhere = {"address": "127.0.0.1:1", "token": self.values[REMOTE_LAUNCHER]}
        nebius = {"subject-credentials": {}, "private_key": self.values[NEBIUS]}
        return {
            **{name: self.values[name] for name in PLAIN},
            HOOK: f"{hook}/hooks/{self.values[HOOK]}",
            REMOTE_OPTIONS: json.dumps(options),
            REMOTE_LAUNCHER: json.dumps(elsewhere),
            NEBIUS: json.dumps(nebius),
        }

    def add_minted(self, runs: Path, run_id: str) -> None:
        """Add what the launcher has made for itself and for a run: tokens and private keys."""
        self.values["the launcher's token"] = json.loads((runs / KEPT[1]).read_text())["token"]
        identity = runs / KEPT[0] / run_id
        self.values["the run's token"] = (identity / "token").read_text()
        for key in identity.glob("*/key.pem"):
            # The first lines of all such keys are alike.
            self.values[f"the TLS key of {key.parent.name}"] = key.read_text().splitlines()[2]

    def traces(self, data: bytes) -> set[str]:
        """Return the names of the secrets in `data`, plain or in base64."""
        return {
            name
            for name, value in self.values.items()
            if any(form in data for form in _forms(value.encode()))
        }

    def in_files(self, folder: Path, *, kept: bool = True) -> dict[str, set[str]]:
        """Return finds by file. `kept` leaves out files for the owner alone."""
        found: dict[str, set[str]] = {}
        for path in folder.rglob("*"):
            if not path.is_file() or (kept and path.relative_to(folder).parts[0] in KEPT):
                continue
            if traces := self.traces(_read(path)):
                found[str(path.relative_to(folder))] = traces
        return found

    def on_command_lines(self) -> dict[str, set[str]]:
        """Return finds by the command lines of all processes of this machine."""
        found: dict[str, set[str]] = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            line = _read(path)
            if traces := self.traces(line):
                found[line.decode(errors="replace")] = traces
        return found

    def in_environments(self, processes: Iterable[psutil.Process]) -> dict[int, set[str]]:
        """Return finds by process, as readable by the same user."""
        return {
            each.pid: self.traces(_read(Path(f"/proc/{each.pid}/environ"))) for each in processes
        }


def merged(found: Mapping[object, set[str]]) -> set[str]:
    return set[str]().union(*found.values())


def _canary(name: str) -> str:
    return f"canary-{name.lower().replace('_', '-')}-{secrets.token_hex(8)}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # It has ended.
        return b""


def _forms(value: bytes) -> list[bytes]:
    """Base64 of a value depends on where in a triple of bytes it begins."""
    encoded: list[bytes] = []
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + value)
        # Characters that also depend on neighbours are left out.
        encoded.append(whole[4 if before else 0 : len(whole) // 4 * 4 - 4])
    return [value, *encoded]
