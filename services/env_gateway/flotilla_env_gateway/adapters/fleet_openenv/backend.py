"""FleetTaskEnv itself, of Fleet's fork of OpenEnv, each in a worker process.

It serves comparison: FleetTaskEnv retries calls that may have been executed, takes a verifier
without a result for a pass, and waits eight seconds before its first request. This backend adds
what it lacks: it tags instances and deletes them."""

import os
import sys
from pathlib import Path

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.adapters.fleet.api import FleetApi
from flotilla_env_gateway.adapters.fleet_openenv.codec import to_task_config
from flotilla_env_gateway.adapters.fleet_openenv.instance import FleetOpenEnvInstance, check_answer
from flotilla_env_gateway.adapters.fleet_openenv.worker_process import FleetTaskEnvProcess
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.server_address import configured_environment, connect_server
from flotilla_env_gateway.adapters.supervised_server import ServerAddress
from flotilla_env_gateway.config.backends import FleetConfig, FleetOpenEnvConfig
from flotilla_env_gateway.ports import Backend, Orphan, ProvisionRequest

PATH_VARIABLE = "OPENENV_FORK_PATH"
_WHERE = "env_gateway.backends.fleet_openenv"
_PACKAGE = Path("envs") / "fleet_env"


def build_fleet_openenv_backend(
    config: FleetOpenEnvConfig, *, max_calls: int
) -> "FleetOpenEnvBackend":
    """Build the backend of the fork. Raises ConfigError if the fork is not found."""
    folder = find_fork_folder(config)
    address, headers = connect_server(config, where=_WHERE)
    http = open_http_session(max_connections=max_calls, headers={})
    api = FleetApi(FleetConfig(), address, http, headers)
    return FleetOpenEnvBackend(config, folder, address, api)


def find_fork_folder(config: FleetOpenEnvConfig) -> Path:
    """Find the folder with `envs/fleet_env`, which is not on any package index."""
    given = config.path or os.environ.get(PATH_VARIABLE)
    if not given:
        raise ConfigError(
            f"backend 'fleet_openenv' needs Fleet's fork of OpenEnv: set {_WHERE}.path, or "
            f"{PATH_VARIABLE} in the environment, to a checkout of it"
        )
    for folder in (Path(given), Path(given) / "src"):
        if (folder / _PACKAGE).is_dir():
            return folder
    raise ConfigError(f"{given} holds neither {_PACKAGE} nor src/{_PACKAGE}; check {_WHERE}.path")


class FleetOpenEnvBackend(Backend):
    isolates_instances = True

    def __init__(
        self, config: FleetOpenEnvConfig, folder: Path, address: ServerAddress, api: FleetApi
    ) -> None:
        self._config = config
        self._address = address
        self._api = api
        worker = Path(__file__).with_name("worker.py")
        self._command = (config.python or sys.executable, str(worker), str(folder))

    async def provision_instance(
        self, request: ProvisionRequest, *, timeout_s: float
    ) -> FleetOpenEnvInstance:
        until = loop_time() + timeout_s
        environment = await self._worker_environment(timeout_s)
        worker = await FleetTaskEnvProcess.start_process(
            self._command, environment, self._config.answer_limits
        )
        message = {
            "op": "open",
            "task": to_task_config(request.task),
            "tag": request.episode_id,
            "ttl_s": int(request.ttl_s) + 1,
        }
        try:
            created = check_answer(
                await worker.send_request(message, timeout_s=until - loop_time())
            )
        except BaseException:
            # Also if cancelled: an untracked process would continue to create instances.
            await worker.kill()
            raise
        return FleetOpenEnvInstance(self._api, worker, created, request)

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        await self._api.delete_run_instances(orphan.episode_id, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the connections. Workers end with the instances, and with this process."""
        await self._api.http.close()
        await self._address.close()

    async def _worker_environment(self, timeout_s: float) -> dict[str, str]:
        """Build the worker's environment, the only place where FleetTaskEnv reads URL and key."""
        url = await self._address.wait_for_root(timeout_s)
        key = self._api.headers.get("authorization", "").removeprefix("Bearer ")
        # It refuses to start without a key, even if the control plane requires none.
        own = {"FLEET_BASE_URL": url, "FLEET_API_KEY": key or "none"}
        return {**configured_environment(self._config, where=_WHERE), **own}
