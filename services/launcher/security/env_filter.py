"""Filter of the launcher's environment: the variables that a run's processes get in addition
to those of every child (`services.common.process.child_environment`).

A rented machine gets the secrets of its service and no others; processes on this machine follow
the same table."""

from collections.abc import Mapping
from typing import Any

from services.launcher.run_spec import RunSpec
from services.launcher.security import secret_names
from services.launcher.security.launcher_address import REMOTE_VARIABLE
from services.launcher.state import LEARNER, SERVICES

# Cloud credentials, as SkyPilot and the launcher read them.
CLOUD_VARIABLES = (
    *("LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY"),
    *("NEBIUS_CREDENTIALS_JSON", "NEBIUS_TENANT_ID"),
)
# Variables that only the launcher itself needs.
LAUNCHERS_OWN = ("SLACK_BOT_TOKEN", REMOTE_VARIABLE, *CLOUD_VARIABLES)
# Variables by which stores of all vendors are configured.
STORE_VARIABLES = (
    *(*secret_names.STORE_SECRETS, "AWS_*", "S3_*", "GOOGLE_*", "GCS_*", "GCLOUD_*", "CLOUDSDK_*"),
    *("AZURE_*", "FSSPEC_*"),
)
HUB_VARIABLE = secret_names.HUB_TOKEN
# Variables that trackers read, by the tracker's name in a spec.
_TRACKER_VARIABLES = {"wandb": "WANDB_*", "mlflow": "MLFLOW_*", "trackio": "TRACKIO_DIR"}


def inherited_variables(spec: RunSpec, service: str) -> tuple[str, ...]:
    """Return the names of the variables that a service inherits.

    These are the variables that its part of the spec and `launcher.sky.secrets` require, and
    those of the store, hub and trackers that the run uses. Identity variables are excluded: the
    run's own identity is passed separately, and another run's must not leak in."""
    named = {
        *secret_names.required_secrets(spec, service),
        *secret_names.optional_secrets(spec, service),
    }
    named -= set(secret_names.IDENTITY_VARIABLES)
    if service == LEARNER:
        named |= _learner_variables(spec.tables.get(LEARNER, {}))
    return tuple(sorted(named))


def variables_of_any_service(spec: RunSpec) -> tuple[str, ...]:
    """Return the variables of all services of the run, for its prepare commands: they use the
    same sources, and the hub."""
    named = (name for service in SERVICES for name in inherited_variables(spec, service))
    return tuple(sorted({HUB_VARIABLE, *named}))


def _learner_variables(section: Mapping[str, Any]) -> set[str]:
    checkpoint: Mapping[str, Any] = section.get("checkpoint") or {}
    tracked = {
        _TRACKER_VARIABLES[name]
        for name in secret_names.tracker_backends(section)
        if name in _TRACKER_VARIABLES
    }
    return {*(STORE_VARIABLES if checkpoint.get("remote") else ()), *tracked}
