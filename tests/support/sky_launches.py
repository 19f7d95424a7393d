"""Launches of a run on machines, for tests."""

from pathlib import Path
from typing import Any

from flotilla_common.spec.config import canonical_json
from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.state import ReplicaKey
from tests.support.run_specs import bare_spec

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

# A catalog of Lambda's, as SkyPilot keeps it.
VMS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
cpu_4x,,,4.0,16.0,0.2,us-east-1,,
gpu_1x_h100,H100,1.0,26.0,200.0,2.49,us-east-1,,1.1
gpu_1x_h100,H100,1.0,26.0,200.0,2.29,us-west-1,,
gpu_8x_h100,H100,8.0,208.0,1800.0,23.92,us-east-1,,
"""


def config(**sky: Any) -> LauncherConfig:
    whole = {"backend": "sky", "max_hours": 1.0, "sky": {**MACHINES, **sky}}
    return LauncherConfig.model_validate_json(canonical_json(whole), strict=True)


def launch(
    key: ReplicaKey,
    settings: LauncherConfig | None = None,
    spec: dict[str, Any] | None = None,
    **changes: Any,
) -> LaunchSpec:
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "key": key,
        "command": (),
        "secrets": {"FLOTILLA_TOKEN": "canary-token", "FLOTILLA_TLS": "canary-tls"},
        "log": Path("unused.log"),
        "registry": "10.0.0.5:4000",
        "spec": bare_spec(spec or {}, settings or config()),
        **changes,
    }
    return LaunchSpec(**values)
