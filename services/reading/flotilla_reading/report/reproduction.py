"""The commands that repeat a run. Pure."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from flotilla_common.spec.spec_values import find_value
from flotilla_common.text.parsing import as_object
from flotilla_reading.report.run_facts import ReportedRun

_DIRTY = "-dirty"


def spec_to_run(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's own spec without what its launcher wrote into it."""
    return {key: value for key, value in spec.items() if key != "written_by"}


def spec_file(run: ReportedRun) -> str:
    """Return the name of the file with a run's spec, next to the page."""
    return f"{run.run_id}.json"


def list_commands(run: ReportedRun) -> Iterator[str]:
    """Yield the commands, and a comment for each thing that they cannot repeat."""
    commit = str(as_object(run.spec.get("written_by")).get("commit", "unknown"))
    if commit.endswith(_DIRTY):
        yield "# Files had been changed since this commit, and the changes are lost:"
    yield f"git checkout {shlex.quote(commit.removesuffix(_DIRTY))}"
    yield "make setup"
    if run.manifest and not _is_made_by_spec(run.spec):
        yield _prepare_command(run.manifest, str(find_value(run.spec, "learner.data")))
    if "***" in str(run.spec):
        yield "# Secrets in this file are shown as ***: fill them in first."
    yield f"flotilla train {shlex.quote(spec_file(run))}"


def _is_made_by_spec(spec: Mapping[str, Any]) -> bool:
    """Return whether a command of the spec makes the folder of the run's data."""
    folder = PurePath(str(find_value(spec, "learner.data"))).parent
    commands = spec.get("prepare")
    listed = map(as_object, commands if isinstance(commands, list) else [])
    return any(PurePath(str(each.get("creates"))) == folder for each in listed)


def _prepare_command(manifest: Mapping[str, Any], path: str) -> str:
    """Return `flotilla data prepare` with what a manifest says that it was given."""
    source = as_object(manifest.get("source"))
    wishes = {
        "data_version": source.get("version"),
        **as_object(manifest.get("filters")),
        **as_object(manifest.get("split")),
        "keep_split": as_object(manifest.get("keep_split")).get("path"),
        "quarantine": as_object(manifest.get("quarantine")).get("path"),
    }
    words = ["flotilla", "data", "prepare", "--out", str(PurePath(path).parent)]
    for name, value in wishes.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False and text:
            words.append(f"--{name.replace('_', '-')}={text}")
    return shlex.join([*words, "--", str(source.get("url"))])
