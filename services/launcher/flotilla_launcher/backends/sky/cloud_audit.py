"""Audit of the clouds themselves for orphans that SkyPilot has forgotten, as defined in
`orphan_machines.py`."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from flotilla_common.adapters.bounded_http import ask, object_of
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text.parsing import TextLimits
from flotilla_launcher.backends.ports import BackendUnreachable, OrphanResource
from flotilla_launcher.backends.sky import orphan_machines
from flotilla_launcher.backends.sky.orphan_machines import BilledMachine
from flotilla_launcher.backends.sky.ports import SkyPilotApi
from flotilla_launcher.run_spec import parse_spec
from flotilla_launcher.store.run_files import SPEC_FILE

_LAMBDA_URL = "https://cloud.lambdalabs.com/api/v1"
# Address of an emulator of that cloud.
_LAMBDA_URL_VARIABLE = "FLOTILLA_LAMBDA_URL"
_LAMBDA_KEYS = Path(".lambda_cloud/lambda_keys")
_REQUEST_S = 20.0
# Some 2 KiB a machine.
_MACHINES = TextLimits(bytes=2**24, values=2**18)
# States of ending machines, which cost nothing.
_ENDING = ("terminating", "terminated", "preempted")


class LambdaCloud:
    """Lambda's own list of machines, read with the key that SkyPilot uses. Methods raise
    BackendUnreachable."""

    # As in `infra`.
    cloud = "lambda"

    def __init__(self) -> None:
        self._keys = Path.home() / _LAMBDA_KEYS
        self._url = os.environ.get(_LAMBDA_URL_VARIABLE, _LAMBDA_URL)

    def has_key(self) -> bool:
        return self._keys.is_file()

    async def list_machines(self) -> list[BilledMachine]:
        """List all machines of the account that cost money."""
        listed = await self._request_list("GET", "/instances")
        billed = [each for each in listed if each["status"] not in _ENDING]
        return [BilledMachine(each["id"], each.get("name") or "") for each in billed]

    async def terminate_machines(self, machines: Iterable[BilledMachine]) -> None:
        body = {"instance_ids": [machine.identity for machine in machines]}
        await self._request_list("POST", "/instance-operations/terminate", body)

    async def _request_list(
        self, method: str, path: str, body: object = None
    ) -> list[dict[str, str]]:
        lines = [line.partition("=") for line in self._keys.read_text().splitlines()]
        keys = {name.strip(): value.strip() for name, _, value in lines}
        try:
            async with httpx.AsyncClient(timeout=_REQUEST_S) as http:
                headers = {"Authorization": f"Bearer {keys.get('api_key', '')}"}
                answer = await ask(
                    http, method, self._url + path, json=body, headers=headers, limits=_MACHINES
                )
                answer.raise_for_status()
                return _listed(await object_of(answer, _MACHINES))
        # An answer without a list counts as none.
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise BackendUnreachable(f"{self.cloud} itself does not answer: {error}") from error


def _listed(answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the machines in an answer. Raises ValueError."""
    match answer.get("data"):
        case [*machines] if all(map(_is_machine, machines)):
            return machines
        case dict():
            # Answer to the termination of machines.
            return []
        case _:
            raise ValueError("an answer without a list of machines")


def _is_machine(value: object) -> bool:
    match value:
        case {"id": str(), "status": str()}:
            return True
        case _:
            return False


class CloudAuditor:
    """Auditor of machines that SkyPilot has forgotten, identified by name. The specs in `runs` name
    the clouds that may have some."""

    def __init__(self, runs: Path, client: SkyPilotApi, providers: Sequence[LambdaCloud]) -> None:
        self._runs = runs
        self._client = client
        self._providers = providers

    async def list_orphans(self, is_orphan: Callable[[str], bool]) -> list[OrphanResource]:
        """List machines with orphans' names that SkyPilot does not know. Raises
        BackendUnreachable."""
        return [
            OrphanResource(f"machine {machine.identity} {machine.name}", "", f"at {provider.cloud}")
            for provider, machines in await self._find_orphans(is_orphan, "*")
            for machine in machines
        ]

    async def end_orphans(self, ours: Callable[[str], bool], runs: str = "*") -> list[str]:
        """End machines with our names that SkyPilot does not know, at the clouds of the runs whose
        folders match; return which. Raises BackendUnreachable."""
        ended: list[str] = []
        for provider, machines in await self._find_orphans(ours, runs):
            await provider.terminate_machines(machines)
            where = f"ended at {provider.cloud}, for SkyPilot had forgotten it"
            ended += [f"machine {each.identity} {each.name}: {where}" for each in machines]
        return ended

    async def _find_orphans(
        self, ours: Callable[[str], bool], runs: str
    ) -> list[tuple[LambdaCloud, list[BilledMachine]]]:
        """Find orphans by name, at the clouds where runs whose folders match may
        have some."""
        clouds = await asyncio.to_thread(self._list_clouds, runs)
        found: list[tuple[LambdaCloud, list[BilledMachine]]] = []
        for provider in self._providers:
            if not clouds & {"", provider.cloud} or not provider.has_key():
                continue
            # In this order, a machine that starts in between is known and of an active run.
            machines = await provider.list_machines()
            known = {cluster.name for cluster in await self._client.list_clusters()}
            left = orphan_machines.find_orphans(machines, ours, known)
            if left:
                found.append((provider, left))
        return found

    def _list_clouds(self, runs: str) -> set[str]:
        found: set[str] = set()
        for file in self._runs.glob(f"{runs}/{SPEC_FILE}"):
            try:
                config = parse_spec(file.read_text(encoding="utf-8")).config
            except (ConfigError, OSError):
                # From another version, or being removed: its machines may be anywhere.
                found.add("")
                continue
            if config.backend == "sky":
                found |= orphan_machines.list_clouds(config.sky)
        return found
