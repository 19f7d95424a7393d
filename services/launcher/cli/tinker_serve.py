"""`flotilla tinker-serve`: a trainer, a sampler, and the front door for clients of the Tinker SDK,
as children of this command."""

import fcntl
import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.common.files.durable_files import replace_file
from services.common.process.arguments import TOKEN_VARIABLE
from services.common.process.extras import install_command
from services.common.process.python_command import python_command
from services.common.rpc.errors import ConfigError
from services.common.rpc.free_ports import free_address
from services.common.rpc.network_addresses import split_host_port
from services.common.spec.spec_loading import apply_override, load_spec
from services.common.text.redaction import find_references
from services.launcher.cli.command_runner import (
    BAD_SPEC,
    INTERRUPTED,
    OK,
    reports_errors,
    run_until_interrupted,
)
from services.launcher.cli.kept_services import KeptService, kept_services
from services.launcher.cli.terminal import CommandError, Terminal

_KEY_VARIABLE = "FLOTILLA_TINKER_KEY"
_KEY_NAME = "local"
# Every process of one folder belongs to one run, however often it is started.
_RUN_ID = "tinker-serve"
# Enough for a first try; --set policy.max_model_len=N changes it.
_WINDOW = 4096
_PACKAGES = ("starlette", "uvicorn", "zstandard")
_GPUS = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class TinkerServing:
    """What is served, and where; without a `config` for a machine like this one."""

    model: str
    listen: str
    config: Path | None
    folder: Path
    # As KEY=VALUE.
    settings: Sequence[str]


@reports_errors(bad_spec=BAD_SPEC)
def serve_tinker(wish: TinkerServing) -> int:
    """Serve until Ctrl-C, which is the normal end."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise CommandError(f"this needs {', '.join(missing)}; {install_command('tinker')}")
    with _own_folder(wish.folder):
        spec = make_spec(wish)
        code = run_until_interrupted(_serve(wish, spec, Terminal(soft_wrap=True)))
    return OK if code == INTERRUPTED else code


def make_spec(wish: TinkerServing) -> dict[str, Any]:
    """Return the run spec of the three services. Raises ConfigError."""
    if not split_host_port(wish.listen, "listen")[1]:
        raise ConfigError(f"--listen {wish.listen}: name a port, since clients are told it")
    spec = load_spec(wish.config) if wish.config else _default_spec(wish.model)
    spec.setdefault("policy", {})["model"] = wish.model
    front = spec.setdefault("tinker", {})
    front["listen"] = wish.listen
    front.setdefault("keys", {_KEY_NAME: f"${_KEY_VARIABLE}"})
    for setting in wish.settings:
        apply_override(spec, f"--{setting}")
    return spec


def _default_spec(model: str) -> dict[str, Any]:
    device, dtype = ("cuda", "bfloat16") if _GPUS.exists() else ("cpu", "float32")
    return {
        "name": "tinker",
        "policy": {"model": model, "dtype": dtype, "max_model_len": _find_window(model)},
        "rollout": {"engine": {"device": device}},
        "learner": {"rank": {"device": device}},
    }


def _find_window(model: str) -> int:
    """Return the context length of a model in a folder, if it is below the default."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
        return min(_WINDOW, int(config["max_position_embeddings"]))
    except (OSError, ValueError, KeyError, TypeError):
        return _WINDOW


@contextmanager
def _own_folder(folder: Path) -> Generator[None]:
    """Hold the folder against a second command. Raises CommandError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CommandError(
                f"another flotilla tinker-serve uses {folder}; pass another --folder"
            ) from error
        yield


def read_or_make_key(folder: Path) -> str:
    """Return the key of clients of this folder: a new one, for its user's eyes only, at the first
    start."""
    path = folder / "key"
    if not path.exists():
        replace_file(path, f"tml-{secrets.token_urlsafe(24)}\n".encode(), mode=0o600)
    return path.read_text().strip()


async def _serve(wish: TinkerServing, spec: Mapping[str, Any], console: Terminal) -> None:
    key = read_or_make_key(wish.folder)
    services = make_services(wish.folder, spec, key)

    def show(text: str) -> None:
        console.print(text, style="dim")

    show(f"loading {wish.model}; logs are in {wish.folder / 'logs'}")
    async with kept_services(services, show) as keeping:
        scheme = "https" if spec["tinker"].get("tls") else "http"
        console.print("Ready. In the terminal of a client of the Tinker SDK:")
        console.print(f"export TINKER_BASE_URL={scheme}://{spec['tinker']['listen']}")
        if find_own_key(spec):
            console.print(f"export TINKER_API_KEY={key}")
        await keeping


def find_own_key(spec: Mapping[str, Any]) -> bool:
    """Return whether the folder's own key is one of the spec's."""
    return _KEY_VARIABLE in find_references(spec["tinker"]["keys"])


def make_services(folder: Path, spec: Mapping[str, Any], key: str) -> list[KeptService]:
    """Write the spec, and return the three services that use it; their addresses stay the same for
    as long as this command runs."""
    path = folder / "spec.json"
    replace_file(path, json.dumps(spec, indent=2).encode())
    token = {TOKEN_VARIABLE: secrets.token_hex(32)}
    addresses = set[str]()
    while len(addresses) < 3:
        addresses.add(free_address())
    training, sampling, front = addresses
    peers = ("--peer", f"learner={training}", "--peer", f"rollout={sampling}")
    given = tuple(name for name in find_references(spec["tinker"]["keys"]) if name != _KEY_VARIABLE)
    own = {_KEY_VARIABLE: key} if find_own_key(spec) else {}

    def make(name: str, module: str, address: str, *words: str, **more: Any) -> KeptService:
        place = ("--run-dir", str(folder / name), "--run-id", _RUN_ID, "--listen", address)
        command = python_command("-m", module, "--config", str(path), *place, *words)
        log = folder / "logs" / f"{name}.log"
        hidden = {**token, **more.get("secrets", {})}
        return KeptService(name, command, address, log, more.get("inherits", ("HF_TOKEN",)), hidden)

    return [
        make("training", "services.learner.training", training),
        make("sampling", "services.rollout.sampling", sampling),
        make("front", "services.tinker", front, *peers, inherits=given, secrets=own),
    ]
