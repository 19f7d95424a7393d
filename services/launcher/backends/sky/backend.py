"""Backend of machines that SkyPilot finds: on clouds, Slurm, Kubernetes and SSH pools.

Everything is found again by name, because SkyPilot's request ids do not outlive its server.
"""

import asyncio
import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from services.launcher.backends.sky import names
from services.launcher.backends.sky.cleanup import Sweeper
from services.launcher.backends.sky.cloud_audit import Auditor, LambdaCloud
from services.launcher.backends.sky.cluster import Clusters
from services.launcher.backends.sky.code_bundle import FOLDER, CodeError, pinned
from services.launcher.backends.sky.cost_estimate import Offerer
from services.launcher.backends.sky.job_group import Groups
from services.launcher.backends.sky.ports import Client
from services.launcher.backends.sky.queue import Board
from services.launcher.backends.sky.sdk_prices import prices
from services.launcher.backends.sky.start import Start
from services.launcher.ports import (
    BackendError,
    BackendUnreachable,
    Evidence,
    Launch,
    Offer,
    Stray,
)
from services.launcher.security import secret_names
from services.launcher.security.sealed_secrets import forget_key, key_in, seal
from services.launcher.state import Exit, Unit

_POLL_S = 5.0
_GATHER_S = 1.0
_OWNER_FILE = ".owner"


class SkyBackend:
    """Starts replicas on machines; `runs` is the folder whose replicas are ours.

    `root` is the working tree whose commit the machines get.
    """

    def __init__(
        self,
        runs: Path,
        root: Path,
        client: Client,
        *,
        poll_s: float = _POLL_S,
        gather_s: float = _GATHER_S,
    ) -> None:
        self._runs = runs.resolve()
        self._root = root
        self._client = client
        self._poll_s = poll_s
        self._owner = _kept_owner(self._runs)
        self._offers = Offerer(self._owner, prices())
        board = Board(client, poll_s)
        self._groups = Groups(client, board, gather_s)
        # Each look at a cluster's job is a call to its machine.
        self._clusters = Clusters(client, 2 * poll_s)
        self._sweeper = Sweeper(client, board, self._owner)
        self._auditor = Auditor(self._runs, self._owner, client, [LambdaCloud()])
        # Names of replicas that are clusters of their own.
        self._plain: set[str] = set()
        self._pinning = asyncio.Lock()

    async def offer(self, launch: Launch) -> Offer:
        return await asyncio.to_thread(self._offers.offer, launch, self._code_of(launch.run_id))

    async def start(self, launch: Launch) -> Unit:
        start = await self._prepared(launch)
        unit = Unit(start.name, started=time.time())
        try:
            await self._keeper(launch, start.name).start(start)
        except asyncio.CancelledError:
            # A server that cannot be asked has lost the request, or it is found by name.
            with suppress(BackendUnreachable):
                await self._client.forget(lambda replica: replica == start.name)
            raise
        return unit

    async def attach(self, launch: Launch, unit: Unit) -> bool:
        limit_s = launch.config.sky.provision.timeout_s
        return await self._keeper(launch, unit.name).attach(unit.name, limit_s)

    async def find(self, launch: Launch) -> Unit | None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        keeper = self._keeper(launch, name)
        while True:
            coming = await self._client.under_way(name)
            if await keeper.live(name):
                return Unit(name, started=time.time())
            if not coming:
                return None
            await asyncio.sleep(self._poll_s)

    async def undo(self, launch: Launch) -> None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        while True:
            coming = await self._client.under_way(name)
            await self._keeper(launch, name).undo(name)
            if not coming:
                return
            await asyncio.sleep(self._poll_s)

    async def price(self, launch: Launch) -> float | None:
        name = names.member_name(self._owner, launch.run_id, launch.key)
        place = await self._keeper(launch, name).place(name)
        return place and await asyncio.to_thread(self._offers.price, launch, place)

    async def wait(self, unit: Unit) -> Exit:
        return await self._keeper_of(unit).wait(unit.name)

    async def drain(self, unit: Unit) -> None:
        await self._keeper_of(unit).drain(unit.name)

    async def kill(self, unit: Unit) -> None:
        await self._keeper_of(unit).kill(unit.name)

    async def orphans(self, known: Collection[Unit]) -> list[Unit]:
        there = await self._sweeper.live_members()
        self._plain |= {name for name, plain in there.items() if plain}
        return [Unit(name) for name in there]

    async def end(self, unit: Unit, grace_s: float) -> None:
        """Its watcher has been draining since its launcher fell silent, or is told by a new one."""
        keeper = self._keeper_of(unit)
        await keeper.drain(unit.name)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await keeper.wait(unit.name)
                return
        await keeper.kill(unit.name)

    async def clean(self, run_id: str) -> Evidence:
        evidence = await self._sweeper.clean(run_id)
        ended = await self._auditor.clean(run_id) if evidence.gone else []
        if ended:
            # It is looked for once more.
            return Evidence(False, "; ".join(ended))
        if evidence.gone:
            forget_key(self._code_of(run_id))
        return evidence

    async def strays(self, active: Collection[str]) -> list[Stray]:
        folders = await asyncio.to_thread(lambda: [path.name for path in self._runs.iterdir()])
        known = await self._sweeper.strays(active, folders)
        return known + await self._auditor.strays(active)

    async def reap(self, active: Collection[str]) -> list[str]:
        ended = await self._sweeper.reap(active)
        return ended + await self._auditor.reap(active)

    def _keeper(self, launch: Launch, name: str) -> Groups | Clusters:
        if launch.config.sky.mode == "cluster":
            self._plain.add(name)
            return self._clusters
        self._plain.discard(name)
        return self._groups

    def _keeper_of(self, unit: Unit) -> Groups | Clusters:
        return self._clusters if unit.name in self._plain else self._groups

    def _code_of(self, run_id: str) -> Path:
        return self._runs / run_id / FOLDER

    async def _prepared(self, launch: Launch) -> Start:
        """Everything that can be wrong before a machine is asked for. Raises BackendError."""
        self._offers.check(launch)
        run_dir, commit = self._runs / launch.run_id, launch.config.sky.commit
        async with self._pinning:
            try:
                found = await asyncio.to_thread(
                    pinned, run_dir, self._root, commit, launch.spec_json
                )
            except CodeError as error:
                raise BackendError(str(error)) from error
        site = self._offers.site(launch, found.folder)
        wanted = secret_names.of_service(site.spec, launch.config, launch.key[0])
        values = _values(wanted, launch, secret_names.if_set(site.spec, launch.key[0]))
        return Start(launch, site, seal(values, key_in(found.folder)))


def _kept_owner(runs: Path) -> str:
    """The mark that the launcher of this folder began with: machines are renamed, and what it has
    at SkyPilot is found by it."""
    path = runs / _OWNER_FILE
    runs.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{_OWNER_FILE}.draft")
        draft.write_text(f"{names.owner_of(runs)}\n", encoding="utf-8")
        draft.replace(path)
    return path.read_text(encoding="utf-8").strip()


def _values(wanted: Collection[str], launch: Launch, if_set: Collection[str]) -> dict[str, str]:
    """The secrets by name: the run's own, and what the launcher's environment holds. Of `if_set`
    none has to be there."""
    found = {name: launch.secrets.get(name) or os.environ.get(name, "") for name in wanted}
    missing = [name for name, value in found.items() if not value]
    if missing:
        raise BackendError(
            f"{launch.key[0]} needs {', '.join(missing)} on its machine; export them where the"
            " launcher is started"
        )
    return {name: os.environ[name] for name in if_set if os.environ.get(name)} | found
