"""Input files that a run's machines need and no commit contains: the files named in its spec,
mostly made by its `[[prepare]]` commands on the launcher's machine."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from flotilla_common.spec.spec_files import named_files


def key_by_input(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the inputs within the code's folder, each with the first key of the spec that names
    it: the model, which may also be an id of the hub, tasks, their manifest and checks, evaluation
    sets and verifiers."""
    found: dict[str, str] = {}
    for key, name in _iter_named(spec):
        if _is_within(name):
            found.setdefault(name, key)
    return found


def must_be_file(name: str, spec: Mapping[str, Any], root: Path) -> bool:
    """Return whether the name can only be a path.

    An id of the hub looks like a path of two parts, but no folder of the code has such a name,
    and no command of the spec makes it."""
    if any(name == table.get("creates") for table in spec.get("prepare", [])):
        return True
    parts = PurePath(name).parts
    if name.startswith(".") or len(parts) > 2:
        return True
    return len(parts) == 2 and (root / parts[0]).is_dir()


def copy_inputs(spec: Mapping[str, Any], root: Path, folder: Path) -> list[str]:
    """Copy the inputs that `folder` lacks from `root`; return those that are in neither.

    Files in `folder` stay: the run began with them."""
    missing: list[str] = []
    for name in key_by_input(spec):
        if (folder / name).exists():
            continue
        if not (root / name).exists():
            missing.append(name)
            continue
        _copy_atomically(root / name, folder / name)
    return missing


def _iter_named(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    learner: Mapping[str, Any] = spec.get("learner", {})
    if "model" in spec.get("policy", {}):
        yield "policy.model", spec["policy"]["model"]
    for key in ("tasks", "data"):
        if learner.get(key):
            yield f"learner.{key}", learner[key]
    for table in ("sft", "warm_start"):
        if data := learner.get(table, {}).get("data"):
            yield f"learner.{table}.data", data
    if checks := learner.get("select", {}).get("checks"):
        yield "learner.select.checks", checks
    for number, each in enumerate(learner.get("eval", {}).get("sets", [])):
        yield f"learner.eval.sets.{number}.tasks", each["tasks"]
    for table, key, dotted in named_files(spec):
        if table[key]:
            yield dotted, table[key]


def _is_within(name: str) -> bool:
    path = PurePath(name)
    # The machines fetch URLs themselves.
    return "://" not in name and not path.is_absolute() and ".." not in path.parts


def _copy_atomically(source: Path, target: Path) -> None:
    """Copy atomically: a launcher may be killed at any moment."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    if source.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft)
    else:
        shutil.copyfile(source, draft)
    draft.replace(target)
