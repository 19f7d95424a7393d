"""Names of the secrets that the machines of a service get, without their values."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from services.common.process.arguments import TOKEN_VARIABLE
from services.common.rpc.tls import TLS_VARIABLE
from services.common.text.redaction import find_references
from services.launcher.config.backend_tables import backend_tables, without_replaced
from services.launcher.run_spec import RunSpec
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT

# Every service's identity within the run, from the launcher.
IDENTITY_VARIABLES = (TOKEN_VARIABLE, TLS_VARIABLE)
_FLEET_DEFAULT, WANDB_KEY = "FLEET_API_KEY", "WANDB_API_KEY"
# Backends of Fleet, whose `api_key_env` defaults to FLEET_API_KEY.
FLEET_BACKENDS = ("fleet", "fleet_openenv")
# Secrets that a store may need; all are optional.
STORE_SECRETS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "FLOTILLA_REMOTE_OPTIONS",
)
HUB_TOKEN = "HF_TOKEN"
# Address and credentials of an MLflow server.
MLFLOW_SECRETS = tuple(f"MLFLOW_TRACKING_{n}" for n in ("URI", "USERNAME", "PASSWORD", "TOKEN"))
# Services that may get each secret with a fixed name.
SECRET_OWNERS: Mapping[str, tuple[str, ...]] = {
    _FLEET_DEFAULT: (GATEWAY,),
    WANDB_KEY: (LEARNER,),
    **dict.fromkeys((*STORE_SECRETS, *MLFLOW_SECRETS), (LEARNER,)),
    HUB_TOKEN: (LEARNER, ROLLOUT),
}


def required_secrets(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the names in order: the identity, those in the service's section, then
    `launcher.sky.secrets`."""
    section: Mapping[str, Any] = spec.tables.get(service, {})
    if service == GATEWAY:
        section = without_replaced(section)
    named = [*find_references(section)]
    if service == GATEWAY:
        named += _backend_keys(section)
    if service == LEARNER and "wandb" in tracker_backends(section):
        named.append(WANDB_KEY)
    return tuple(dict.fromkeys((*IDENTITY_VARIABLES, *named, *spec.config.sky.secrets)))


def optional_secrets(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the names of secrets that the service's machine gets only if the launcher has them:
    a store may have other credentials, a model may be public, and MLflow may need no server."""
    learner: Mapping[str, Any] = spec.tables.get(LEARNER, {})
    checkpoint: Mapping[str, Any] = learner.get("checkpoint") or {}
    named = (*STORE_SECRETS,) if checkpoint.get("remote") else ()
    if "mlflow" in tracker_backends(learner):
        named = (*named, *MLFLOW_SECRETS)
    if _is_at_hub(spec.tables):
        named = (*named, HUB_TOKEN)
    return tuple(name for name in named if service in SECRET_OWNERS[name])


def tracker_backends(section: Mapping[str, Any]) -> Sequence[str]:
    """Return the trackers that the learner's section of a spec lists."""
    return section.get("tracking", {}).get("backends", [])


def _is_at_hub(tables: Mapping[str, Any]) -> bool:
    """Return whether the policy's name looks like the hub's `NAME` or `OWNER/NAME`. A folder may
    have such a name too."""
    model = str(tables.get("policy", {}).get("model", ""))
    made = [table.get("creates") for table in tables.get("prepare", [])]
    parts = PurePath(model).parts
    a_path = model.startswith(("/", ".", "~")) or model in made
    return 0 < len(parts) <= 2 and not a_path


def _backend_keys(section: Mapping[str, Any]) -> list[str]:
    """Return the API key variables of the environments in use. A backend with its own `command`
    needs none."""
    environments: Mapping[str, Mapping[str, Any]] = section.get("environments", {})
    used = {section.get("backend"), *(e.get("backend") for e in environments.values())}
    named: list[str] = []
    for backend in sorted(name for name in used if name):
        default = _FLEET_DEFAULT if backend in FLEET_BACKENDS else None
        for options in backend_tables(section, backend).values():
            variable = options.get("api_key_env", default)
            if variable and not options.get("command"):
                named.append(variable)
    return named
