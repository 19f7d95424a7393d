"""Cache of graded canary episodes, so that the same one is not played again."""

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.own_packages import folder_of
from flotilla_common.process.spec_commands import resolve_command
from flotilla_common.spec.function_names import FunctionName
from flotilla_launcher.config.backend_tables import FLEET_BACKENDS
from flotilla_launcher.doctor.canaries import Canary
from flotilla_launcher.doctor.dataset import task_field, version_of
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import GATEWAY, ROLLOUT

RESULTS_FILE = ".doctor.json"
# Packages of a server and other invisible inputs change in time.
_GOOD_FOR_S = 7 * 86400.0
_KEPT = 512
# A folder with more does not belong to one environment.
_MOST_FILES = 4000
_PROMPT_FILES = (
    *("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"),
    *("config.json", "processor_config.json", "preprocessor_config.json"),
)
_ENVIRONMENTS = "flotilla_environments"
_GATEWAY_SOURCES = ("flotilla_env_gateway", "flotilla_common")


class PlayedEpisodes:
    """Times at which episodes were last graded, in a file of the folder of all runs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESULTS_FILE

    def played_at(self, key: str, now: float) -> float | None:
        """Return when the episode was graded, in seconds since the epoch; None if it has to be
        played."""
        at = self._read_file().get(key)
        return at if at is not None and 0 <= now - at < _GOOD_FOR_S else None

    def note_played(self, keys: Iterable[str], now: float) -> None:
        """Record graded episodes. A file that cannot be written only costs the next run an
        episode."""
        known = {**self._read_file(), **dict.fromkeys(keys, now)}
        newest = sorted(known.items(), key=lambda item: item[1])[-_KEPT:]
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(dict(newest)).encode())

    def _read_file(self) -> dict[str, float]:
        try:
            found = json.loads(self._path.read_text())
            return {str(key): float(at) for key, at in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def key_of_episodes(context: RunContext, canaries: Sequence[Canary]) -> str | None:
    """Return a digest of all that the grades of an environment's episodes depend on; None if that
    cannot be determined, as for a server that a third party runs."""
    section, first = context.get_section(GATEWAY), canaries[0]
    server = _server_identity(section, first)
    if server is None:
        return None
    own = section["environments"].get(first.env_key) or {}
    if FunctionName.parse(own.get("verifier") or ""):
        # Its module may import anything.
        return None
    files = [own.get("verifier"), section["verifiers"]["digests"]]
    parts = [
        [_task_inputs(canary) for canary in canaries],
        section,
        [_file_digest(Path(path)) for path in files if path],
        server,
        _prompt_inputs(context),
        # What runs the verifiers, and the gateway.
        _file_states(_folders_of(*_GATEWAY_SOURCES)),
        [_file_digest(folder / "verifiers.sha256") for folder in _folders_of(_ENVIRONMENTS)],
        (str(context.python or sys.executable), _last_install_time()),
        (shutil.which("bwrap"), os.geteuid()),
    ]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _task_inputs(canary: Canary) -> object:
    """Return the inputs of a task that determine its grade."""
    version = version_of(canary.task)
    names = ("task_modality", "offered_tools", "env_variables", "passes_untouched")
    return (
        (version.env_key, version.env_version, version.data_version),
        task_field(canary.task, "data_id", "data_key"),
        canary.verifier,
        [canary.task.get(name) for name in names],
    )


def _prompt_inputs(context: RunContext) -> object:
    """Return the inputs that determine the prompt's length and its limit."""
    policy, rollout = context.shared.policy, context.sections.get(ROLLOUT, {})
    keys = ("dialect", "max_input_length", "max_generate_length")
    return (
        (policy.model, policy.revision, policy.trust_remote_code, policy.vision),
        [rollout.get(key) for key in keys],
        [_file_digest(Path(policy.model) / name) for name in _PROMPT_FILES],
        _file_digest(Path(rollout.get("dialect", {}).get("chat_template", ""))),
    )


def _server_identity(section: Mapping[str, Any], canary: Canary) -> object:
    """Return the identity of the environment's server; None if it cannot be determined, or if its
    episodes may see what a run before them wrote."""
    config = section["backends"].get(canary.backend) or {}
    if canary.backend == "embedded":
        return _file_states(_folders_of(_ENVIRONMENTS))
    if canary.backend == "mcp":
        if len(section["servers"]) != 1 or not section["servers"][0]["instances"]:
            return None
        config = section["servers"][0]
    command = config.get("command")
    if command:
        return _command_state(command)
    return config.get("url") if canary.backend in FLEET_BACKENDS else None


def _command_state(command: Sequence[str]) -> object:
    """Return the state of the Python files that a command runs, and of those beside them."""
    words = ("", *resolve_command(command))
    files = [path for pair in pairwise(words) for path in _code_files(*pair)]
    return _file_states(files) if files else None


def _code_files(before: str, word: str) -> list[Path]:
    if before == "-m":
        top = word.partition(".")[0]
        here = Path.cwd() / top
        return [*_folders_of(top), *([here] if here.is_dir() else [])]
    path = Path(word)
    if path.suffix != ".py" or not path.is_file():
        return []
    # Not the whole tree: it may be a home directory.
    return [path, *path.parent.glob("*.py"), *path.parent.glob("*/*.py")]


def _folders_of(*packages: str) -> list[Path]:
    return [folder for name in packages if (folder := folder_of(name)) is not None]


def _file_states(paths: Sequence[Path]) -> object:
    """Return name, size and time of each Python file below; None if there are too many."""
    found: list[tuple[str, int, int]] = []
    for path in _python_files(paths):
        with suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_size, stat.st_mtime_ns))
        if len(found) > _MOST_FILES:
            return None
    return sorted(found)


def _python_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from [path] if path.is_file() else path.rglob("*.py")


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return str(error)


def _last_install_time() -> int:
    with suppress(OSError):
        return Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    return 0
