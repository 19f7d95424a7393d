"""A desk whose process is killed again and again: no order is lost, and none answered twice."""

import asyncio
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.child_environment import child_environment
from tests.support.process_forge import shared_forge
from tests.support.repository import ROOT
from tests.support.started_process import start_process
from tests.tinker.work.desk_doubles import BASE

FEWEST_KILLS = 20
MODULE = "tests.tinker.work.killed_desk"
_LIMIT_S = 240.0


class KilledDesk:
    """A process with a desk that is started again after each kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = 0
        self._start()

    def _start(self) -> None:
        (self.folder / "socket").unlink(missing_ok=True)
        command = shared_forge(MODULE).python_command("-m", MODULE, str(self.folder))
        environment = {**child_environment(), "PYTHONPATH": f"{ROOT}:{ROOT}/gen"}
        self.process, _ = start_process(command, env=environment, cwd=ROOT)

    def kill(self, *, lose_peers: bool) -> None:
        self.end()
        self.kills += 1
        if lose_peers:
            (self.folder / "peers").unlink(missing_ok=True)
        self._start()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    async def ask(self, **asked: Any) -> dict[str, Any]:
        """Ask until there is an answer, whichever process gives it."""
        while True:
            with suppress(OSError, ValueError):
                reader, writer = await asyncio.open_unix_connection(self.folder / "socket")
                try:
                    writer.write(json.dumps(asked).encode() + b"\n")
                    return json.loads(await reader.readline())
                finally:
                    writer.close()
            await asyncio.sleep(0.01)

    async def result_of(self, request_id: str) -> dict[str, Any]:
        while "pending" in (found := await self.ask(id=request_id)):
            pass
        return found


def work_of(session: str) -> list[dict[str, Any]]:
    """Orders of two models and of the base, whose results depend on all before them."""
    orders = list[dict[str, Any]]()
    for number in range(2):
        model = f"{session}:train:{number}"

        def add(kind: str, seq: int, /, place: str = model, **body: Any) -> None:
            orders.append({"kind": kind, "of": session, "place": place, "seq": seq, "body": body})

        add("create_model", 0, base_model=BASE, lora_rank=8, seed=number)
        for step in range(12):
            first = 1 + 5 * step
            add("forward_backward", first, tokens=[step, number])
            add("forward_backward", first + 1, tokens=[step + 100, number])
            add("optim_step", first + 2)
            if step == 6:
                path = f"tinker://{model}/weights/w3"
                add("load_weights", first + 3, path=path, with_optimizer=True)
            else:
                add("save_weights", first + 3, path_name=f"w{step}")
            add(
                "save_weights_for_sampler",
                first + 4,
                path_name=None,
                sampling_session_seq_id=100 * number + step,
                kind="inflight" if step % 2 else "snapshot",
            )
    for seq in range(150):
        body = {"target": BASE, "prompt": [seq + 1000], "num_samples": 1 + seq % 3}
        orders.append({"kind": "sample", "of": session, "place": None, "seq": seq, "body": body})
    return orders


async def carry_out(desk: KilledDesk, session: str, *, kill: bool) -> list[dict[str, Any]]:
    """Send all orders in random order, as clients do that repeat what was not acknowledged; return
    their results, each checked to be the same whenever it is asked for."""
    orders = work_of(session)
    shuffled = random.sample(range(len(orders)), len(orders))
    gate = asyncio.Semaphore(8)
    results = dict[int, dict[str, Any]]()

    async def keep_killing() -> None:
        while kill and len(results) < len(orders):
            await asyncio.sleep(random.uniform(0.02, 0.2))
            await asyncio.to_thread(desk.kill, lose_peers=random.random() < 0.4)

    async def send(place: int) -> tuple[int, str]:
        async with gate:
            await asyncio.sleep(random.uniform(0, 0.2))
            first = await desk.ask(**orders[place])
            assert "id" in first, first
            return place, first["id"]

    # A model is created before its orders come.
    created = [place for place, order in enumerate(orders) if order["kind"] == "create_model"]
    for place in created:
        results[place] = await desk.result_of((await send(place))[1])
    rest = [place for place in shuffled if place not in created]

    async def finish(place: int) -> None:
        _, request_id = await send(place)
        results[place] = await desk.result_of(request_id)
        await asyncio.sleep(random.uniform(0, 1.0))
        assert (await desk.ask(**orders[place])) == {"id": request_id}
        assert await desk.result_of(request_id) == results[place]

    async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
        group.create_task(keep_killing())
        for place in rest:
            group.create_task(finish(place))
    return [results[place] for place in range(len(orders))]


def without_ids(results: list[dict[str, Any]], session: str) -> list[str]:
    return [json.dumps(each).replace(session, "SESSION") for each in results]


@pytest.mark.slow
async def test_kills_lose_no_order_and_change_no_result(tmp_path: Path) -> None:
    found = list[list[str]]()
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        desk = KilledDesk(tmp_path / name)
        try:
            session = (await desk.ask(session=True))["session"]
            results = await carry_out(desk, session, kill=name == "killed")
            found.append(without_ids(results, session))
            assert all("result" in each for each in results), results
        finally:
            desk.end()
    assert desk.kills >= FEWEST_KILLS
    assert found[0] == found[1]
