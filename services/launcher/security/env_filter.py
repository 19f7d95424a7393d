"""Filter of the launcher's own variables that the processes of a run get, beyond what any
process of ours gets (`services.common.child_environment`).

A rented machine gets the secrets of its service and no others; processes of this machine follow
the same table."""

from collections.abc import Mapping
from typing import Any

from services.launcher.config.launcher import LauncherConfig
from services.launcher.security import secret_names
from services.launcher.security.launcher_address import REMOTE_VARIABLE
from services.launcher.state import LEARNER, SERVICES

# Of clouds, as SkyPilot and the launcher read them.
CLOUD_VARIABLES = (
    *("LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY"),
    *("NEBIUS_CREDENTIALS_JSON", "NEBIUS_TENANT_ID"),
)
# What only the launcher itself has a use for.
LAUNCHERS_OWN = ("SLACK_BOT_TOKEN", REMOTE_VARIABLE, *CLOUD_VARIABLES)
# How a store of any vendor is found and opened.
STORE_VARIABLES = (
    *(*secret_names.STORE_SECRETS, "AWS_*", "S3_*", "GOOGLE_*", "GCS_*", "GCLOUD_*", "CLOUDSDK_*"),
    *("AZURE_*", "FSSPEC_*"),
)
HUB_VARIABLE = secret_names.HUB_TOKEN
# What trackers read, by their names in a spec.
_TRACKER_VARIABLES = {"wandb": "WANDB_*", "mlflow": "MLFLOW_*", "trackio": "TRACKIO_DIR"}


def inherited_variables(
    spec: Mapping[str, Any], config: LauncherConfig, service: str
) -> tuple[str, ...]:
    """Return the names of variables that a service is given.

    These are the variables that its part of the spec and `launcher.sky.secrets` ask for, and
    those of a store, the hub and trackers where the run uses them. The run's own identity comes
    another way, and another's has no business there."""
    named = {
        *secret_names.required_secrets(spec, config, service),
        *secret_names.optional_secrets(spec, service),
    }
    named -= set(secret_names.IDENTITY_VARIABLES)
    if service == LEARNER:
        named |= _learner_variables(spec.get(LEARNER, {}))
    return tuple(sorted(named))


def variables_of_any_service(spec: Mapping[str, Any], config: LauncherConfig) -> tuple[str, ...]:
    """Return what any service of the run is given: for the commands that prepare it, which
    fetch from where the services do, and from the hub."""
    named = (name for service in SERVICES for name in inherited_variables(spec, config, service))
    return tuple(sorted({HUB_VARIABLE, *named}))


def _learner_variables(section: Mapping[str, Any]) -> set[str]:
    checkpoint: Mapping[str, Any] = section.get("checkpoint") or {}
    tracked = {
        _TRACKER_VARIABLES[name]
        for name in secret_names.tracker_backends(section)
        if name in _TRACKER_VARIABLES
    }
    return {*(STORE_VARIABLES if checkpoint.get("remote") else ()), *tracked}
