"""Launches of a run on machines, for tests."""

from pathlib import Path
from typing import Any

from services.common.config import canonical_json
from services.launcher.config import LauncherConfig
from services.launcher.ports import Launch
from services.launcher.runs import Key

RUN_ID = "tiny-20260101-000000"
MACHINES = {
    "learner": {"ordered": [{"infra": "lambda", "accelerators": "H100:1"}]},
    "env_gateway": {"ordered": [{"infra": "lambda", "cpus": "4+"}]},
    "rollout": {
        "any_of": [
            {"infra": "lambda/us-east-1", "accelerators": "H100:1"},
            {"infra": "lambda/us-west-1", "accelerators": "H100:1"},
        ]
    },
}


def config(**sky: Any) -> LauncherConfig:
    whole = {"backend": "sky", "max_hours": 1.0, "sky": {**MACHINES, **sky}}
    return LauncherConfig.model_validate_json(canonical_json(whole), strict=True)


def launch(
    key: Key,
    settings: LauncherConfig | None = None,
    spec: dict[str, Any] | None = None,
    **changes: Any,
) -> Launch:
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "key": key,
        "command": (),
        "secrets": {"FLOTILLA_TOKEN": "canary-token", "FLOTILLA_TLS": "canary-tls"},
        "log": Path("unused.log"),
        "registry": "10.0.0.5:4000",
        "spec_json": canonical_json(spec or {}),
        "config": settings or config(),
        **changes,
    }
    return Launch(**values)
