"""Loading of run specs: TOML or JSON, with dotted overrides."""

import json
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.data_table import expand_data_table
from flotilla_common.spec.old_names import translate_names
from flotilla_common.spec.spec import name_rollout_engine
from flotilla_common.spec.spec_files import resolve_spec_files
from flotilla_common.text.printable_text import print_visible

# The spec comes on standard input, so that no caller has to write a file.
STANDARD_INPUT = Path("-")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Load the run spec in `path` and apply `--a.b=value` overrides to it.

    The file is TOML, or JSON by its suffix; `-` is JSON on standard input. `{seed}` inside any
    string becomes the value of the top-level key `seed`, paths relative to the spec become relative
    to the working directory, and what is short for something else becomes that. Raises
    ConfigError."""
    spec = _read(path)
    resolve_spec_files(spec, path.parent)
    for override in overrides:
        apply_override(spec, override)
    seed = spec.get("seed", 0)
    spec = {key: _with_seed(value, str(seed)) for key, value in spec.items()}
    spec = expand_spec(spec, where=str(path))
    canonical_json(spec, where=str(path))
    return spec


def expand_spec(spec: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a spec in which what is short for something else is replaced by that: `[data]`, and
    `learner.engine` for the rollout's. Old names become today's, with a warning unless they are in
    a run's own spec. Raises ConfigError."""
    spec, renamed = translate_names(spec)
    if renamed and "written_by" not in spec:
        told = ", ".join(f"`{old}` is `{new}` now" for old, new in renamed.items())
        _warn(f"warning: {where}: {told}")
    return name_rollout_engine(expand_data_table(spec, where=where))


@cache
def _warn(line: str) -> None:
    """Print a warning once."""
    print_visible(line, file=sys.stderr)


def apply_override(spec: dict[str, Any], override: str) -> None:
    """Set one `--a.b=value` in `spec`, creating missing tables. Raises ConfigError."""
    key, equals, text = override.removeprefix("--").partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r}: write --section.key=value")
    node: Any = spec
    for depth, part in enumerate(parts[:-1]):
        where = ".".join(parts[: depth + 1])
        if isinstance(node, list):
            node = node[_parse_index(node, part, override)]
        else:
            node = node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(f"override {override!r}: {where} is a value, not a table")
    if isinstance(node, list):
        node[_parse_index(node, parts[-1], override)] = parse_value(text)
    else:
        node[parts[-1]] = parse_value(text)


def _parse_index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(
            f"override {override!r}: {part!r} is not one of the {len(items)} indices of the list"
        )
    return int(part)


def parse_value(text: str) -> Any:
    """Return `text` as a TOML value if it is one, else the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    is_json = isinstance(value, str | bool | int | float | list | dict)
    return value if len(parsed) == 1 and is_json else text


def _with_seed(value: Any, seed: str) -> Any:
    if isinstance(value, str):
        return value.replace("{seed}", seed)
    if isinstance(value, dict):
        return {key: _with_seed(item, seed) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_seed(item, seed) for item in value]
    return value


def _read(path: Path) -> dict[str, Any]:
    piped = path == STANDARD_INPUT
    try:
        text = sys.stdin.read() if piped else path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    as_json = piped or path.suffix == ".json"
    try:
        spec: Any = json.loads(text) if as_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not {'JSON' if as_json else 'TOML'}: {error}") from error
    if not isinstance(spec, dict):
        raise ConfigError(f"{path}: the top level must be a table")
    return spec
