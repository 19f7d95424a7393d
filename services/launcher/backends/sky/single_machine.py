"""Task for a whole run on one machine with plain `sky launch`, without a launcher."""

import shlex
from collections.abc import Sequence
from typing import Any

from services.common.python_command import python_command
from services.launcher.backends.sky import cost_estimate, machine_candidates, task_documents
from services.launcher.backends.sky.machine_script import OWN_CODE
from services.launcher.config.launcher import LauncherConfig
from services.launcher.security import secret_names
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT

REMOTE = "CHECKPOINT_REMOTE"

# Variables of the task, each with the override of the run that a value becomes.
CHOICES = {
    "MODALITY": "learner.select.modality",
    "ENV_KEYS": "learner.select.env_keys",
    "DIFFICULTY": "learner.select.difficulty",
    "MAX_TASKS": "learner.select.max_tasks",
    "DATA_VERSION": "learner.select.data_version",
    REMOTE: cost_estimate.REMOTE,
}
# Always text: unquoted, a version such as 0.3 would be a number.
_QUOTED = ("DATA_VERSION",)
RESUME = "RESUME_RUN_NAME"
# Without the key, wandb logs to the machine's disk.
_OPTIONAL_SECRETS = ("WANDB_API_KEY",)


def whole_run_task(
    spec_path: str, spec: dict[str, Any], config: LauncherConfig, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the task, on the learner's candidates.

    Secrets are given by `--secret NAME`; those that are empty here may be left out. `spec` has
    the overrides, the file at `spec_path` has not."""
    sky = config.sky
    machine = task_documents.resources_from_machines(machine_candidates.machines_of(sky, LEARNER))
    machine["autostop"] = {"idle_minutes": sky.idle_minutes, "down": True, "wait_for": "jobs"}
    return {
        "name": spec["name"],
        "resources": machine,
        "workdir": ".",
        "envs": dict.fromkeys((*CHOICES, RESUME), ""),
        "secrets": _task_secrets(spec, config),
        "setup": f"set -e\n{sky.setup}\n",
        "run": _task_script(spec_path, spec, config, overrides),
    }


def _task_secrets(spec: dict[str, Any], config: LauncherConfig) -> dict[str, str | None]:
    """Return the task's secrets.

    Services of one machine make their own token. The place that the model is uploaded to may be
    chosen only at the launch."""
    found: dict[str, str | None] = {}
    for service in (GATEWAY, LEARNER, ROLLOUT):
        for name in secret_names.required_secrets(spec, config, service):
            if name not in secret_names.IDENTITY_VARIABLES:
                found[name] = "" if name in _OPTIONAL_SECRETS else None
    for name in (*secret_names.STORE_SECRETS, *secret_names.optional_secrets(spec, LEARNER)):
        found.setdefault(name, "")
    return found


def _task_script(
    spec_path: str, spec: dict[str, Any], config: LauncherConfig, overrides: Sequence[str]
) -> str:
    # The run to resume comes first: the command takes the word after its spec as one.
    lines = ["CHOSEN=()", f'[ -z "${RESUME}" ] || CHOSEN+=("${RESUME}" --resume)']
    lines += [f"CHOSEN+=({shlex.quote(override)})" for override in overrides]
    for name, key in CHOICES.items():
        lines.append(f'[ -z "${name}" ] || CHOSEN+=("--{key}={_shell_value(name)}")')
    lines += _warning_lines(spec, config)
    limit = task_documents.hard_limit_s(config)
    flotilla = " ".join(
        python_command("-m", "services.launcher.cli.app", executable=config.sky.python)
    )
    lines.append(
        f"timeout --kill-after=60 {limit} {flotilla} train"
        # Overrides the backend of the spec.
        f' {shlex.quote(spec_path)} "${{CHOSEN[@]}}" --launcher.backend=local'
    )
    return "\n".join([OWN_CODE, *lines]) + "\n"


def _warning_lines(spec: dict[str, Any], config: LauncherConfig) -> list[str]:
    """Return shell lines that warn at the run's start if none of it will be kept. A
    run that was uploaded before continues to be."""
    lost = cost_estimate.describe_unkept(spec.get(LEARNER, {}), config)
    if not lost:
        return []
    warning = f"WARNING: {lost}; to keep them, launch with --env {REMOTE}=s3://BUCKET/PREFIX"
    return [
        f'if [[ -z "${REMOTE}" && "${RESUME}" != *://* ]]; then',
        f'  echo "{warning}" >&2',
        "fi",
    ]


def _shell_value(name: str) -> str:
    """Return the variable for a shell's double quotes, with TOML's quotes if it is text."""
    return f'\\"${{{name}//[\\"\\\\]/}}\\"' if name in _QUOTED else f"${name}"
