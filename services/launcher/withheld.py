"""Which of the launcher's own variables a replica on this machine does not get.

A rented machine gets the secrets of its service and no others; here a process would inherit all
that the launcher was started with.
"""

from collections.abc import Mapping
from typing import Any

from services.launcher.address_file import REMOTE_VARIABLE
from services.launcher.config import LauncherConfig
from services.launcher.runs import SERVICES
from services.launcher.sky import secret_names

# Who may have what is known by name; nobody what is the launcher's alone.
KNOWN: Mapping[str, tuple[str, ...]] = {
    **secret_names.OWNERS,
    "SLACK_BOT_TOKEN": (),
    REMOTE_VARIABLE: (),
    "LAMBDA_API_KEY": (),
    "RUNPOD_API_KEY": (),
    "VAST_API_KEY": (),
    "PRIME_INTELLECT_API_KEY": (),
    "NEBIUS_CREDENTIALS_JSON": (),
    "NEBIUS_TENANT_ID": (),
}


def withheld(spec: Mapping[str, Any], config: LauncherConfig, service: str) -> frozenset[str]:
    """Names; what the service's own part of the spec, or `launcher.sky.secrets`, asks for is not
    among them. The run's own identity comes another way, and another's has no business there."""
    identity = set(secret_names.IDENTITY)
    mine = set(secret_names.of_service(spec, config, service)) - identity
    others = {
        name
        for other in SERVICES
        if other != service
        for name in secret_names.of_service(spec, config, other)
    }
    known = {name for name, owners in KNOWN.items() if service not in owners}
    return frozenset((identity | others | known | launchers_own(config)) - mine)


def launchers_own(config: LauncherConfig) -> set[str]:
    """Names of what nothing but the launcher itself has a use for."""
    notify = config.notify
    told = {notify.slack.token_env, notify.webhook_env or notify.slack.token_env}
    return told | {name for name, owners in KNOWN.items() if not owners}
