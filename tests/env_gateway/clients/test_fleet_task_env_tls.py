"""FleetTaskEnv with a gateway on another machine."""

from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.tls import TLS_VARIABLE
from flotilla_env_gateway.clients.fleet_task_env import make_fleet_task_env
from flotilla_launcher.security import certificates
from tests.env_gateway.clients.fleet_task_envs import TASK, Here
from tests.support.outsiders import RUN, beyond_loopback, run
from tests.support.threaded_gateway import TOKEN, served


def test_an_episode_is_played_under_tls(tmp_path: Path) -> None:
    certificates.store_identity(tmp_path, run())
    own = certificates.identity_folder(tmp_path, RUN) / "rollout"
    at = served(listen=f"{beyond_loopback()}:0", tls=run().tls_for("env_gateway"))
    with at as gateway:
        env = Here(gateway).env(tls_dir=own)
        assert env.reset()["step"] == 0
        env.close()


def test_a_gateway_beyond_loopback_is_refused_at_once_without_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TLS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="refusing to call"):
        make_fleet_task_env(TASK, gateway=f"{beyond_loopback()}:7", token=TOKEN)
