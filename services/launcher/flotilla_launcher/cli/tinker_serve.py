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

from flotilla_common.aio.concurrency import raise_failure, wait_for_any
from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.arguments import TOKEN_VARIABLE
from flotilla_common.process.extras import install_command
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.spec.spec_loading import apply_override, load_spec
from flotilla_common.text.redaction import find_references
from flotilla_launcher.backends.local.gpu_reservations import visible_gpus
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    INTERRUPTED,
    OK,
    reports_errors,
    run_until_interrupted,
)
from flotilla_launcher.cli.kept_services import KeptService, kept_services
from flotilla_launcher.cli.terminal import CommandError, Terminal

_KEY_VARIABLE = "FLOTILLA_TINKER_KEY"
_KEY_NAME = "local"
_HUB_TOKEN = "HF_TOKEN"
# Every process of one folder belongs to one run, however often it is started.
_RUN_ID = "tinker-serve"
# Enough for a first try; --set policy.max_model_len=N changes it.
_WINDOW = 4096
_PACKAGES = ("starlette", "uvicorn", "zstandard")
# Of a GPU that the trainer uses too.
_SHARED_GPU = 0.45


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
    gpus = visible_gpus()
    device, dtype = ("cuda", "bfloat16") if gpus else ("cpu", "float32")
    shared = {"gpu_memory_utilization": _SHARED_GPU} if len(gpus) == 1 else {}
    return {
        "name": "tinker",
        "policy": {"model": model, "dtype": dtype, "max_model_len": _find_window(model)},
        "rollout": {"engine": {"device": device, **shared}},
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
    *engines, front = make_services(wish.folder, spec, key)

    def show(text: str) -> None:
        console.print(text, style="dim")

    show(f"loading {wish.model}; logs are in {wish.folder / 'logs'}")
    # The front begins with what both tell about themselves, and ends before them.
    async with kept_services(engines, show) as first, kept_services([front], show) as second:
        scheme = "https" if spec["tinker"].get("tls") else "http"
        console.print("Ready. In the terminal of a client of the Tinker SDK:")
        console.print(f"export TINKER_BASE_URL={scheme}://{spec['tinker']['listen']}")
        if find_own_key(spec):
            console.print(f"export TINKER_API_KEY={key}")
        await wait_for_any([first, second])
        raise_failure([first, second])


def find_own_key(spec: Mapping[str, Any]) -> bool:
    """Return whether the folder's own key is one of the spec's."""
    return _KEY_VARIABLE in find_references(spec["tinker"]["keys"])


def split_gpus(spec: Mapping[str, Any], gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the variable that gives the trainer GPUs of its own, and that of the sampler; none if
    there are too few, so that they share."""
    rank = spec.get("learner", {}).get("rank", {})
    engine = spec.get("rollout", {}).get("engine", {})
    trains = rank.get("processes", 1) if rank.get("device") == "cuda" else 0
    workers = engine.get("tensor_parallel", 1) * engine.get("data_parallel", 1)
    samples = workers if engine.get("device", "cuda") == "cuda" else 0
    if trains + samples > len(gpus):
        return [{}, {}]
    chosen = (gpus[:trains], gpus[trains : trains + samples])
    return [{"CUDA_VISIBLE_DEVICES": ",".join(each)} if each else {} for each in chosen]


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

    def make(
        name: str,
        module: str,
        address: str,
        variables: Mapping[str, str],
        inherits: Sequence[str] = (_HUB_TOKEN,),
        words: Sequence[str] = (),
    ) -> KeptService:
        place = ("--run-dir", str(folder / name), "--run-id", _RUN_ID, "--listen", address)
        command = python_command("-m", module, "--config", str(path), *place, *words)
        log = folder / "logs" / f"{name}.log"
        return KeptService(name, command, address, log, inherits, {**token, **variables})

    for_trainer, for_sampler = split_gpus(spec, visible_gpus())
    return [
        make("training", "flotilla_learner.training", training, for_trainer),
        make("sampling", "flotilla_rollout.sampling", sampling, for_sampler),
        make("front", "flotilla_tinker", front, own, given, peers),
    ]
