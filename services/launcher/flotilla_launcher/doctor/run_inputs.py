"""Files that a run reads first, checked before it has a folder: its task files and its model."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from flotilla_launcher.control.prepare_commands import parse_prepare_tables
from flotilla_launcher.doctor.dataset import comes_later, task_file_keys
from flotilla_launcher.doctor.model_access import resolve_commit
from flotilla_launcher.doctor.run_context import RunContext, is_made_later, make_run_context
from flotilla_launcher.run_spec import BadSpecError, RunSpec
from flotilla_launcher.state import LEARNER, ROLLOUT

# An id of a model on the hub: `name` or `owner/name`.
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


async def pin_model(plan: RunSpec, environ: Mapping[str, str] = os.environ) -> str | None:
    """Check the run's files as `ports.ModelPin`, and return its model's commit. Raises
    ConfigError."""
    check_files(plan)
    return await resolve_commit(plan, environ)


def check_files(plan: RunSpec) -> None:
    """Raise ConfigError if a task file or the model is missing on this machine, and no
    `[[prepare]]` makes it. A model that may be on the hub is looked for by `pin_model`."""
    problems = list(_find_missing(make_run_context(plan, Path(), os.environ)))
    if problems:
        raise BadSpecError("\n".join(problems))


def _find_missing(context: RunContext) -> Iterator[str]:
    replaced, spec = context.plan.config.modules, context.plan.tables
    parse_prepare_tables(spec)
    if not {LEARNER, ROLLOUT} & replaced.keys():
        model = context.shared.policy.model
        here = Path(model).is_dir() or is_made_later(context, model)
        if not here and not _HUB_ID.fullmatch(model):
            what = "is a file" if Path(model).is_file() else "does not exist"
            yield (
                f"policy.model: {model!r} {what}: write the folder of a model, or its id on the hub"
            )
    # Another implementation may not have these keys.
    learner = {} if LEARNER in replaced else spec.get(LEARNER, {})
    files = task_file_keys(learner) if learner else {}
    for table in ("sft", "warm_start"):
        if data := learner.get(table, {}).get("data"):
            files[data] = f"learner.{table}.data"
    if checks := learner.get("select", {}).get("checks"):
        files[checks] = "learner.select.checks"
    for path, key in files.items():
        if not Path(path).is_file() and not comes_later(context, path):
            what = "is no file" if Path(path).exists() else "does not exist"
            yield f"{key}: {path!r} {what}: correct it, or make the file"
