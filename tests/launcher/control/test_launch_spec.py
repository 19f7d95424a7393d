"""The command of a replica."""

from pathlib import Path

from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.config.local import LocalConfig
from flotilla_launcher.control.launch_spec import replica_command
from flotilla_launcher.state import RunMode
from tests.support.run_specs import bare_spec


def command(config: LauncherConfig, service: str) -> list[str]:
    run_dir = Path("/runs/a-1")
    return [
        *replica_command(
            bare_spec({}, config), (service, 0), run_dir, "127.0.0.1:7000", RunMode.TRAIN
        )
    ]


def test_a_run_of_this_machine_alone_is_on_loopback_without_certificates() -> None:
    for service in ("learner", "env_gateway", "rollout"):
        words = command(LauncherConfig(), service)
        assert words[words.index("--listen") + 1] == "127.0.0.1:0"
        assert "--tls-dir" not in words


def test_a_run_that_other_machines_reach_has_certificates_and_its_gateway_on_loopback() -> None:
    config = LauncherConfig(local=LocalConfig(network="private"))
    for service in ("learner", "env_gateway", "rollout"):
        words = command(config, service)
        assert words[words.index("--tls-dir") + 1] == f"/runs/.identity/a-1/{service}"
        # The backend adds this machine's own address, which it knows.
        assert ("--listen" in words) is (service == "env_gateway")
