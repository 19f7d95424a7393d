"""Files and folders that a run spec names relative to itself, whatever the working directory."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.spec.function_names import FunctionName

# `*` matches any key of a table, and any item of a list.
_VERIFIER = ("env_gateway", "environments", "*", "verifier")
_KEYS = (
    ("env_gateway", "verifiers", "digests"),
    _VERIFIER,
    ("env_gateway", "servers", "*", "template"),
    ("rollout", "dialect", "chat_template"),
    ("learner", "judge", "instructions"),
)


def resolve_spec_files(spec: dict[str, Any], folder: Path) -> None:
    """Rewrite keys that name a file in `folder`, the spec's, to paths from the working directory.

    Names of other files are left alone and count from the working directory, so a second call
    changes nothing. A function of a module in `folder` gets that folder before its name."""
    for table, name in _named_functions(spec):
        if (folder / name.folder).is_dir() and name.lies_in(folder / name.folder):
            table["verifier"] = f"{_from_here(folder / name.folder)}/{name.dotted}"
    for table, key, _ in named_files(spec):
        there = folder / table[key]
        if table[key] and there.exists():
            table[key] = str(_from_here(there))


def named_files(spec: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the table, the key and its dotted name for each of these keys that names a file."""
    for *path, key in _KEYS:
        for table in _tables(spec, path):
            text = table.get(key)
            is_function = key == _VERIFIER[-1] and FunctionName.parse(str(text))
            if isinstance(text, str) and not is_function:
                yield table, key, ".".join((*path, key))


def _named_functions(spec: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], FunctionName]]:
    *path, key = _VERIFIER
    for table in _tables(spec, path):
        text = table.get(key)
        if isinstance(text, str) and (name := FunctionName.parse(text)):
            yield table, name


def _tables(node: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:
    if isinstance(node, list) and path and path[0] == "*":
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    if not path:
        yield node
        return
    chosen = node.values() if path[0] == "*" else [node.get(path[0])]
    for each in chosen:
        yield from _tables(each, path[1:])


def _from_here(path: Path) -> Path:
    """Return a path relative to the working directory if it lies within: other machines have
    another one."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return whole.relative_to(here) if whole.is_relative_to(here) else whole
