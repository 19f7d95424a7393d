"""Names of the variables that a run's processes get from the launcher's environment, in addition to
those of every child (`flotilla_common.process.child_environment`); never their values.

A rented machine gets the secrets of its service and no others; processes on this machine follow
the same table."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from flotilla_common.process.arguments import TOKEN_VARIABLE
from flotilla_common.rpc.tls import TLS_VARIABLE
from flotilla_common.text.redaction import find_references
from flotilla_launcher.config.backend_tables import FLEET_KEY, key_variables, without_replaced
from flotilla_launcher.config.tinker_rules import KEY_VARIABLE
from flotilla_launcher.run_spec import RunSpec
from flotilla_launcher.security.launcher_address import REMOTE_VARIABLE
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, SERVICES

# Every service's identity within the run, from the launcher.
IDENTITY_VARIABLES = (TOKEN_VARIABLE, TLS_VARIABLE)
WANDB_KEY = "WANDB_API_KEY"
# Secrets that a store may need; all are optional.
STORE_SECRETS = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "FLOTILLA_REMOTE_OPTIONS",
)
HUB_TOKEN = "HF_TOKEN"
# Where a Tinker service is, and whom it bills: neither opens anything.
TINKER_PLACES = ("TINKER_BASE_URL", "TINKER_PROJECT_ID")
# Address and credentials of an MLflow server.
MLFLOW_SECRETS = tuple(f"MLFLOW_TRACKING_{n}" for n in ("URI", "USERNAME", "PASSWORD", "TOKEN"))
# Cloud credentials, as SkyPilot and the launcher read them.
CLOUD_VARIABLES = (
    *("LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY"),
    *("NEBIUS_CREDENTIALS_JSON", "NEBIUS_TENANT_ID"),
)
# Variables that only the launcher itself needs.
LAUNCHERS_OWN = ("SLACK_BOT_TOKEN", REMOTE_VARIABLE, *CLOUD_VARIABLES)
# Variables by which stores of all vendors are configured.
STORE_VARIABLES = (
    *(*STORE_SECRETS, "AWS_*", "S3_*", "GOOGLE_*", "GCS_*", "GCLOUD_*", "CLOUDSDK_*"),
    *("AZURE_*", "FSSPEC_*"),
)
# Variables that trackers read, by the tracker's name in a spec.
_TRACKER_VARIABLES = {"wandb": "WANDB_*", "mlflow": "MLFLOW_*", "trackio": "TRACKIO_DIR"}
# Services that may get each secret with a fixed name.
SECRET_OWNERS: Mapping[str, tuple[str, ...]] = {
    FLEET_KEY: (GATEWAY,),
    WANDB_KEY: (LEARNER,),
    **dict.fromkeys((*STORE_SECRETS, *MLFLOW_SECRETS), (LEARNER,)),
    **dict.fromkeys((HUB_TOKEN, KEY_VARIABLE, *TINKER_PLACES), (LEARNER, ROLLOUT)),
}


def inherited_variables(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the names of the variables that a service inherits.

    These are the variables that its part of the spec and `launcher.sky.secrets` require, and
    those of the store, hub and trackers that the run uses. Identity variables are excluded: the
    run's own identity is passed separately, and another run's must not leak in."""
    named = {*required_secrets(spec, service), *optional_secrets(spec, service)}
    named -= set(IDENTITY_VARIABLES)
    if spec.uses_tinker and service in SECRET_OWNERS[KEY_VARIABLE]:
        # The client has settings of its own.
        named.add("TINKER_*")
    if service == LEARNER:
        section: Mapping[str, Any] = spec.tables.get(LEARNER, {})
        checkpoint: Mapping[str, Any] = section.get("checkpoint") or {}
        named.update(STORE_VARIABLES if checkpoint.get("remote") else ())
        trackers = tracker_backends(section)
        named.update(_TRACKER_VARIABLES[name] for name in trackers if name in _TRACKER_VARIABLES)
    return tuple(sorted(named))


def variables_of_any_service(spec: RunSpec) -> tuple[str, ...]:
    """Return the variables of all services of the run, for its prepare commands: they use the
    same sources, and the hub."""
    named = (name for service in SERVICES for name in inherited_variables(spec, service))
    return tuple(sorted({HUB_TOKEN, *named}))


def required_secrets(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the names in order: the identity, those in the service's section and those that its
    keys imply, then `launcher.sky.secrets`."""
    section: Mapping[str, Any] = spec.tables.get(service, {})
    keys: list[str] = []
    if service == GATEWAY:
        section = without_replaced(section)
        keys = key_variables(section)
    named = [*find_references(section), *keys]
    if service == LEARNER and "wandb" in tracker_backends(section):
        named.append(WANDB_KEY)
    if spec.uses_tinker and service in SECRET_OWNERS[KEY_VARIABLE]:
        named.append(KEY_VARIABLE)
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
    if spec.uses_tinker:
        named = (*named, *TINKER_PLACES)
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
