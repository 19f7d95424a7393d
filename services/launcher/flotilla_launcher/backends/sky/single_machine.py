"""Task for a whole run on one machine with plain `sky launch`, without a launcher."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from flotilla_common.process.python_command import python_command
from flotilla_launcher.backends.sky import cost_estimate, machine_candidates, task_documents
from flotilla_launcher.backends.sky.machine_script import OWN_CODE
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.security import service_variables
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT

REMOTE = "CHECKPOINT_REMOTE"

# Variables of the task, each with the override of the run that a value becomes.
_OF_DATA = {
    "MODALITY": "data.modality",
    "ENV_KEYS": "data.env",
    "DIFFICULTY": "data.difficulty",
    "MAX_TASKS": "data.max_tasks",
    "DATA_SOURCE": "data.source",
    "DATA_VERSION": "data.version",
}
# The same for a spec without `[data]`, whose tasks are in files.
_OF_FILES = {
    "MODALITY": "learner.select.modality",
    "ENV_KEYS": "learner.select.env_keys",
    "DIFFICULTY": "learner.select.difficulty",
    "MAX_TASKS": "learner.select.max_tasks",
    "DATA_VERSION": "learner.select.data_version",
}
_CHOICES = {
    "STEPS": "learner.steps",
    "MAX_TURNS": "rollout.max_turns",
    "MAX_INPUT_LENGTH": "rollout.max_input_length",
    "MAX_GENERATE_LENGTH": "rollout.max_generate_length",
    REMOTE: cost_estimate.REMOTE,
}
# Always text: unquoted, a version such as 0.3 would be a number.
_QUOTED = ("DATA_SOURCE", "DATA_VERSION")
RESUME = "RESUME_RUN_NAME"
# Variables that such tasks often take and this one cannot honour, each with what to give instead.
REFUSED = {
    "NUM_EPOCHS": "a run has a number of steps: give --env STEPS=N",
    "LOGGER": "metrics go to wandb with --env WANDB_API_KEY=KEY",
    "INFERENCE_BACKEND": "the engine is vLLM",
    "RUN_ID": "a run names itself; RESUME_RUN_NAME resumes one",
}
# What the learner tracks with if its spec does not say.
_TRACKERS = ("jsonl", "console")
# Where a partition or a pod may have GPUs that no candidate names.
_UNSIZED = ("slurm", "kubernetes", "ssh")


def whole_run_task(spec_path: str, spec: RunSpec, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the task, on the learner's candidates.

    Secrets without a value must be given by `--secret NAME`. Those that may be left out are
    variables instead: SkyPilot lets an empty secret hide what `--env` gives, and takes `--secret`
    for a variable too. `spec` has the overrides, the file at `spec_path` has not."""
    sky = spec.config.sky
    machine = task_documents.resources_from_machines(machine_candidates.machines_of(sky, LEARNER))
    machine["autostop"] = {"idle_minutes": sky.idle_minutes, "down": True, "wait_for": "jobs"}
    required, optional = _list_secrets(spec)
    return {
        "name": spec.name,
        "resources": machine,
        "workdir": ".",
        "envs": dict.fromkeys((*choices_of(spec), RESUME, *optional), ""),
        "secrets": dict.fromkeys(required),
        "setup": "\n".join(["set -e", *_refusing_lines(), sky.setup, ""]),
        "run": _task_script(spec_path, spec, overrides),
    }


def choices_of(spec: RunSpec) -> dict[str, str]:
    """Return the variables that the task of a spec takes, each with the override that a value
    becomes."""
    prepared = spec.tables.get(LEARNER, {}).get("data")
    return {**(_OF_DATA if prepared else _OF_FILES), **_CHOICES}


def check_gpus(config: LauncherConfig) -> list[str]:
    """List the candidates for the whole run that have fewer GPUs than its services get there."""
    each, replicas = config.gpu_counts(), config.replica_counts()
    wanted = sum(each[service] * replicas[service] for service in each)
    problems: list[str] = []
    for machine in machine_candidates.machines_of(config.sky, LEARNER).candidates:
        kind, there = machine_candidates.parse_accelerator(machine.accelerators) or ("", 0)
        unknown = not kind and machine_candidates.cloud_of(machine) in _UNSIZED
        if there < wanted and not unknown:
            problems.append(
                f"--one-machine: launcher.SERVICE.gpus come to {wanted} for all replicas,"
                f" {task_documents.describe_machine(machine)} of launcher.sky.{LEARNER} has"
                f" {there:g}: name a machine with {wanted}, such as"
                f" {kind.upper() or 'H100'}:{wanted}, or lower launcher.SERVICE.gpus or"
                " launcher.rollout.replicas"
            )
    return problems


def _list_secrets(spec: RunSpec) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of the secrets that must be given, and of those that may be left out.

    Services of one machine make their own token. The place that the model is uploaded to, and
    wandb, may be chosen only at the launch; without its key wandb logs to the machine's disk."""
    named = (
        name
        for service in (GATEWAY, LEARNER, ROLLOUT)
        for name in service_variables.required_secrets(spec, service)
    )
    unneeded = (*service_variables.IDENTITY_VARIABLES, service_variables.WANDB_KEY)
    required = [name for name in dict.fromkeys(named) if name not in unneeded]
    optional = (
        *(service_variables.WANDB_KEY, *service_variables.STORE_SECRETS),
        *service_variables.optional_secrets(spec, LEARNER),
    )
    return required, [name for name in dict.fromkeys(optional) if name not in required]


def _refusing_lines() -> list[str]:
    """Return shell lines that end the setup, before it installs anything, if a variable is given
    that would be ignored."""
    return [
        f'[ -z "${{{name}:-}}" ] ||'
        f' {{ echo "error: {name} is not supported: {instead}" >&2; exit 1; }}'
        for name, instead in REFUSED.items()
    ]


def _task_script(spec_path: str, spec: RunSpec, overrides: Sequence[str]) -> str:
    # The run to resume comes first: the command takes the word after its spec as one.
    lines = ["CHOSEN=()", f'[ -z "${RESUME}" ] || CHOSEN+=("${RESUME}" --resume)']
    lines += [f"CHOSEN+=({shlex.quote(override)})" for override in overrides]
    for name, key in choices_of(spec).items():
        lines.append(f'[ -z "${name}" ] || CHOSEN+=("--{key}={_shell_value(name)}")')
    lines += _tracker_lines(spec.tables.get(LEARNER, {}))
    lines += _warning_lines(spec)
    limit = task_documents.hard_limit_s(spec.config)
    flotilla = " ".join(
        python_command("-m", "flotilla_launcher.cli.app", executable=spec.config.sky.python)
    )
    lines.append(
        f"timeout --kill-after=60 {limit} {flotilla} train"
        # Overrides the backend of the spec.
        f' {shlex.quote(spec_path)} "${{CHOSEN[@]}}" --launcher.backend=local'
    )
    return "\n".join([OWN_CODE, *lines]) + "\n"


def _tracker_lines(learner: dict[str, Any]) -> list[str]:
    """Return the shell line that adds wandb to the run's trackers if there is a key of it."""
    backends = service_variables.tracker_backends(learner) or _TRACKERS
    if "wandb" in backends:
        return []
    chosen = shlex.quote(f"--learner.tracking.backends={json.dumps([*backends, 'wandb'])}")
    return [f'[ -z "${service_variables.WANDB_KEY}" ] || CHOSEN+=({chosen})']


def _warning_lines(spec: RunSpec) -> list[str]:
    """Return shell lines that warn at the run's start if none of it will be kept. A
    run that was uploaded before continues to be."""
    lost = cost_estimate.describe_unkept(spec.tables.get(LEARNER, {}), spec.config)
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
