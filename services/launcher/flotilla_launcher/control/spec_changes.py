"""The spec with which a run resumes, and its differences from the run's own. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flotilla_common.process.own_version import own_version
from flotilla_common.spec.config import SECRET_KEY, ConfigError
from flotilla_common.spec.old_names import translate_names
from flotilla_common.spec.spec import named_writer, parse_shared
from flotilla_common.spec.spec_values import diff_values, format_value
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.store.row_codec import StoredRun

# Keys that a begun run can never change, and the reasons.
_FIXED = {
    "seed": "the order of its tasks and every draw depend on it",
    "learner.data": "its tasks are those of this manifest",
    "learner.objective": "its journal holds the steps of this objective",
    "learner.warm_start": "its first steps are those of this warm start",
    "policy.model": "its checkpoints and journal belong to this model",
    "policy.revision": "its checkpoints and journal belong to this model",
    "policy.tinker.model": "its checkpoints belong to this model",
    "policy.dtype": "engine and trainer were compared in it",
    "policy.rope_scaling": "its weights were trained under it",
    "policy.vision": "its checkpoints and trajectories are of a policy that sees so",
}
_CRITIC = ("learner.algorithm.advantage", "gae")
# A revision that the launcher has pinned.
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class SpecChange:
    """One key that differs."""

    key: str
    old: Any
    new: Any

    @property
    def fixed_reason(self) -> str:
        """Reason why a run that has begun cannot take the change; empty if it can."""
        if (self.key, self.new) == _CRITIC:
            return "its checkpoints hold no critic"
        if self.key == "learner.engine" and "tinker" in (self.old, self.new):
            return "its checkpoints are with those who trained it"
        found = (why for key, why in _FIXED.items() if f"{self.key}.".startswith(f"{key}."))
        return next(found, "")

    def format_change(self) -> str:
        text = (
            f"{self.key}: the run has {format_value(self.old)}, the file {format_value(self.new)}"
        )
        if SECRET_KEY.search(self.key):
            text = f"{self.key}: differs"
        return f"{text} (cannot change: {self.fixed_reason})" if self.fixed_reason else text


def continue_spec(
    before: StoredRun, spec: RunSpec, *, begun: bool
) -> tuple[RunSpec, tuple[RunNote, ...]]:
    """Return the spec with which a run resumes, and notes for people: on the commit of its model,
    unless it names another. Raises ConfigError for another name, and for changes to keys on which
    the journal and checkpoints of a run that has `begun` depend."""
    run_id, known = before.run.run_id, json.loads(before.spec_json)
    if before.run.name != spec.name:
        raise ConfigError(f"name: run {run_id} is of spec {before.run.name!r}, not {spec.name!r}")
    found = [c for c in diff_specs(known, spec.tables) if c.fixed_reason] if begun else []
    if found:
        lines = "\n".join(f"  {change.format_change()}" for change in found)
        head = f"run {run_id} cannot resume with these changes; start a new run:"
        raise ConfigError(f"{head}\n{lines}")
    if commit := kept_commit(known, spec.tables):
        spec = spec.with_revision(commit)
    writer = named_writer(known)
    if writer is None or writer == own_version():
        return spec, ()
    note = RunNote(f"the run was written by {writer}, and goes on under {own_version()}")
    return spec, (note,)


def kept_commit(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return the run's pinned commit if the new spec names none: it has no revision, or a
    moving one."""
    old, new = (parse_shared(spec, where="spec").policy for spec in (stored, wanted))
    pinned, fixed = _COMMIT.fullmatch(old.revision or ""), _COMMIT.fullmatch(new.revision or "")
    return old.revision if old.model == new.model and pinned and not fixed else None


def diff_specs(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[SpecChange]:
    """Return every differing key, in dotted form. Raises ConfigError."""
    old, new = _with_defaults(stored, "the run's own spec"), _with_defaults(wanted, "spec")
    if commit := kept_commit(stored, wanted):
        new["policy"]["revision"] = commit
    return [SpecChange(*change) for change in diff_values(old, new)]


def _with_defaults(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Add the defaults of the shared tables, so that all fixed keys are present, and replace old
    names by today's. Which Flotilla wrote a spec is no part of it."""
    spec, _ = translate_names(spec)
    shared = parse_shared(spec, where=where).model_dump(mode="json", exclude={"written_by"})
    return {**{key: spec[key] for key in spec if key != "written_by"}, **shared}
