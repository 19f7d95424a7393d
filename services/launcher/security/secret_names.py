"""Which secrets the machines of a service get, by name; their values never come here."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from services.common.arguments import TOKEN_VARIABLE
from services.common.secret_values import referenced
from services.common.tls import TLS_VARIABLE
from services.launcher.config.launcher import LauncherConfig
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT

# What every service gets from the launcher: who it is within the run.
IDENTITY = (TOKEN_VARIABLE, TLS_VARIABLE)
_FLEET_DEFAULT, _WANDB = "FLEET_API_KEY", "WANDB_API_KEY"
# Backends whose `api_key_env` is that unless the spec says otherwise.
_AT_FLEET = ("fleet", "fleet_openenv")
# What a store may want, none of it for certain.
STORES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "FLOTILLA_REMOTE_OPTIONS",
)
HUB = "HF_TOKEN"
# Who has use for what is known by name, wherever it runs.
OWNERS: Mapping[str, tuple[str, ...]] = {
    _FLEET_DEFAULT: (GATEWAY,),
    _WANDB: (LEARNER,),
    **dict.fromkeys(STORES, (LEARNER,)),
    HUB: (LEARNER, ROLLOUT),
}


def of_service(spec: Mapping[str, Any], config: LauncherConfig, service: str) -> tuple[str, ...]:
    """The names in order: the identity, what the service's section names, what the spec adds."""
    section: Mapping[str, Any] = spec.get(service, {})
    named = [*referenced(section)]
    if service == GATEWAY:
        named += _of_backends(section)
    if service == LEARNER and "wandb" in section.get("tracking", {}).get("backends", []):
        named.append(_WANDB)
    return tuple(dict.fromkeys((*IDENTITY, *named, *config.sky.secrets)))


def if_set(spec: Mapping[str, Any], service: str) -> tuple[str, ...]:
    """Further names, of what the service's machine gets where the launcher has it: a store may be
    open by other means, and a model to everybody."""
    checkpoint: Mapping[str, Any] = spec.get(LEARNER, {}).get("checkpoint") or {}
    named = (*STORES,) if checkpoint.get("remote") else ()
    if _is_at_hub(spec):
        named = (*named, HUB)
    return tuple(name for name in named if service in OWNERS[name])


def _is_at_hub(spec: Mapping[str, Any]) -> bool:
    """Whether the policy is `NAME` or `OWNER/NAME` of the hub, as far as that can be told from it:
    a folder may be called so too."""
    model = str(spec.get("policy", {}).get("model", ""))
    made = [table.get("creates") for table in spec.get("prepare", [])]
    parts = PurePath(model).parts
    a_path = model.startswith(("/", ".", "~")) or model in made
    return 0 < len(parts) <= 2 and not a_path


def _of_backends(section: Mapping[str, Any]) -> list[str]:
    """API keys of the environments that are used; one served by a command of ours needs none."""
    environments: Mapping[str, Mapping[str, Any]] = section.get("environments", {})
    used = {section.get("backend"), *(e.get("backend") for e in environments.values())}
    named: list[str] = []
    for backend in sorted(name for name in used if name):
        options: Mapping[str, Any] = section.get("backends", {}).get(backend, {})
        default = _FLEET_DEFAULT if backend in _AT_FLEET else None
        variable = options.get("api_key_env", default)
        if variable and not options.get("command"):
            named.append(variable)
    return named
