"""What a run's machines need and no commit has: the files that its spec names, mostly made by its
`[[prepare]]` commands on the launcher's machine."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any


def named(spec: Mapping[str, Any]) -> list[str]:
    """The model, the tasks and the evaluation sets, where they are paths within the code's folder;
    a model may also be an id of the hub."""
    return [each for each in dict.fromkeys(_named(spec)) if _is_within(each)]


def bring(spec: Mapping[str, Any], root: Path, folder: Path) -> list[str]:
    """Copy from `root` what `folder` does not have; returns what is in neither.

    What `folder` has stays: it is what the run began with.
    """
    missing: list[str] = []
    for name in named(spec):
        if (folder / name).exists():
            continue
        if not (root / name).exists():
            missing.append(name)
            continue
        _copy(root / name, folder / name)
    return missing


def _named(spec: Mapping[str, Any]) -> Iterator[str]:
    learner: Mapping[str, Any] = spec.get("learner", {})
    sets = learner.get("eval", {}).get("sets", [])
    for table, key in ((spec.get("policy", {}), "model"), (learner, "tasks")):
        if key in table:
            yield table[key]
    for each in sets:
        yield each["tasks"]


def _is_within(name: str) -> bool:
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all: a launcher may be killed in the middle."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    if source.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft)
    else:
        shutil.copyfile(source, draft)
    draft.replace(target)
