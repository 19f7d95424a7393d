"""Workers of embedded environments that hang, end and misspeak, and a pool that outlives them."""

import asyncio
import os
import select
import signal
import sys
import textwrap
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.adapters.embedded.backend import EmbeddedBackend, EmbeddedInstance
from flotilla_env_gateway.adapters.embedded.pool import EnvironmentWorker, WorkerPool
from flotilla_env_gateway.config.backends import EmbeddedConfig
from flotilla_env_gateway.ports import BackendError, ProvisionRequest, SqlValue
from tests.support.repository import ROOT
from tests.support.started_process import started
from tests.support.waiting import until

# Counts for ever, or nearly so, within SQLite.
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@asynccontextmanager
async def pool(*, size: int = 1, hang_s: float = 30.0) -> AsyncGenerator[WorkerPool]:
    workers = WorkerPool(size=size, hang_s=hang_s)
    try:
        yield workers
    finally:
        await workers.close()


@asynccontextmanager
async def backend(**config: Any) -> AsyncGenerator[EmbeddedBackend]:
    embedded = EmbeddedBackend(EmbeddedConfig(**config))
    try:
        yield embedded
    finally:
        await embedded.close()


async def instance(of: EmbeddedBackend, name: str) -> EmbeddedInstance:
    task = Task(key="t", prompt="p", env_key="booking", data_key="train-000001")
    return await of.provision_instance(ProvisionRequest(name, task, ttl_s=60.0), timeout_s=10.0)


async def query_worker(
    worker: EnvironmentWorker, op: str = "instances", timeout_s: float = 10.0
) -> Mapping[str, Any]:
    return await worker.send_request({"op": op}, timeout_s=timeout_s)


async def test_requests_are_answered_in_order_each_with_its_own_answer() -> None:
    async with pool() as workers:
        worker = await workers.pick_worker(10.0)
        opened = [
            worker.send_request(
                {
                    "op": "open",
                    "instance": f"i{number}",
                    "env_key": "booking",
                    "data_id": "train-000001" if number % 2 else "nowhere",
                    "data_version": "v1",
                },
                timeout_s=10.0,
            )
            for number in range(20)
        ]
        answers = await asyncio.gather(*opened)
        assert ["refused" in answer for answer in answers] == [True, False] * 10
        assert len((await query_worker(worker))["instances"]) == 10


async def test_instances_are_spread_over_the_workers() -> None:
    async with backend(workers=2) as embedded:
        await until(lambda: len(embedded.pool.workers) == 2)
        instances = [await instance(embedded, f"e{number}") for number in range(6)]
        assert [worker.instances for worker in embedded.pool.workers] == [3, 3]
        await instances[0].close(timeout_s=5.0)
        await instances[0].close(timeout_s=5.0)
        assert sorted(worker.instances for worker in embedded.pool.workers) == [2, 3]


async def test_a_call_that_waits_behind_another_has_certainly_not_been_executed() -> None:
    async with pool() as workers:
        worker = await workers.pick_worker(10.0)
        await query_worker(worker)
        os.kill(worker.pid, signal.SIGSTOP)
        outcomes = await asyncio.gather(
            *(query_worker(worker, timeout_s=0.1) for _ in range(3)), return_exceptions=True
        )
        os.kill(worker.pid, signal.SIGCONT)
        delivered = [error.delivered for error in outcomes if isinstance(error, BackendError)]
        assert delivered == [None, False, False]
        assert (await query_worker(worker))["instances"] == []


async def test_a_worker_that_is_only_slow_lives_on_with_its_instances() -> None:
    async with backend(workers=1) as embedded:
        slow = await instance(embedded, "slow")
        worker = embedded.pool.workers[0]
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(BackendError, match="timeout"):
            await slow.list_tools(timeout_s=0.05)
        os.kill(worker.pid, signal.SIGCONT)
        assert await slow.list_tools(timeout_s=5.0)
        assert await slow.is_alive(timeout_s=1.0)


async def test_a_worker_that_hangs_is_ended_and_another_takes_its_place() -> None:
    async with backend(workers=2, hang_s=0.3) as embedded:
        await until(lambda: len(embedded.pool.workers) == 2)
        hung, well = await instance(embedded, "hung"), await instance(embedded, "well")
        pid = embedded.pool.workers[0].pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BackendError) as caught:
            await hung.list_tools(timeout_s=10.0)
        assert (caught.value.lost, caught.value.delivered) == (True, None)
        assert not await hung.is_alive(timeout_s=1.0)
        with pytest.raises(BackendError) as caught:
            await hung.call_tool("find_bookings", {}, timeout_s=1.0)
        assert (caught.value.lost, caught.value.delivered) == (True, False)
        assert await well.list_tools(timeout_s=5.0)
        await hung.close(timeout_s=1.0)
        await until(lambda: len(embedded.pool.workers) == 2)
        assert pid not in {worker.pid for worker in embedded.pool.workers}


async def test_the_event_loop_continues_while_an_app_is_busy() -> None:
    async with backend(workers=1) as embedded:
        busy = await instance(embedded, "busy")
        query = asyncio.create_task(_endless(busy))
        ticks = 0
        while not query.done():
            await asyncio.sleep(0.001)
            ticks += 1
        assert ticks > 10
        assert "interrupted" in query.result()


async def _endless(of: EmbeddedInstance) -> str:
    try:
        await of.query_database("current", ENDLESS, (), timeout_s=10.0)
    except Exception as error:  # noqa: BLE001 - the test checks which one
        return str(error)
    return ""


@pytest.mark.parametrize("value", [None, 1, 2.5, "text", b"\x00\xff"])
async def test_values_of_every_kind_pass_the_pipe_both_ways(value: SqlValue) -> None:
    async with backend(workers=1) as embedded:
        one = await instance(embedded, "values")
        rows = await one.query_database("current", "SELECT ?", (value,), timeout_s=5.0)
        assert [list(row) for row in rows.rows] == [[value]]


async def test_what_is_not_json_is_refused_before_it_is_sent() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    async with backend(workers=1) as embedded:
        one = await instance(embedded, "nested")
        with pytest.raises(BackendError) as caught:
            await one.call_tool("find_bookings", nested, timeout_s=5.0)
        assert (caught.value.delivered, caught.value.bad_arguments) == (False, True)
        assert await one.list_tools(timeout_s=5.0)


async def test_an_answer_of_too_much_is_refused_and_its_worker_continues() -> None:
    counted = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 50000)"
    async with backend(workers=1) as embedded:
        one = await instance(embedded, "large")
        why = "the answer is too large: it holds more than 262144 values"
        with pytest.raises(BackendError, match=why) as caught:
            await one.query_database(
                "current", f"{counted} SELECT i, i, i, i, i FROM n", (), timeout_s=10.0
            )
        assert (caught.value.kind, caught.value.invalid) == ("too_large", True)
        assert await one.list_tools(timeout_s=5.0)


async def test_an_apps_own_fault_is_reported_and_its_neighbours_continue() -> None:
    async with pool() as workers:
        worker = await workers.pick_worker(10.0)
        with pytest.raises(BackendError) as caught:
            await worker.send_request({"op": "call", "instance": "never opened"}, timeout_s=5.0)
        assert (caught.value.kind, caught.value.delivered) == ("internal", None)
        assert (await query_worker(worker))["instances"] == []


async def test_a_closed_pool_leaves_no_process() -> None:
    async with pool(size=2) as workers:
        await until(lambda: len(workers.workers) == 2)
        pids = [worker.pid for worker in workers.workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_with_a_gateway_that_is_killed() -> None:
    program = textwrap.dedent("""
        import asyncio
        from flotilla_env_gateway.adapters.embedded.pool import WorkerPool

        async def main():
            pool = WorkerPool(size=2, hang_s=30.0)
            while len(pool.workers) < 2:
                await asyncio.sleep(0.01)
            for worker in pool.workers:
                await worker.send_request({"op": "instances"}, timeout_s=10.0)
            print(*(worker.pid for worker in pool.workers), flush=True)
            await asyncio.sleep(60.0)

        asyncio.run(main())
    """)
    command = [sys.executable, "-c", program]
    with started(command, cwd=ROOT) as (gateway, line):
        pids = [int(pid) for pid in line.split()]
        gateway.kill()
    assert len(pids) == 2
    for pid in pids:
        _assert_ends(pid)


def _assert_ends(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    readable, _, _ = select.select([descriptor], [], [], 5.0)
    os.close(descriptor)
    assert readable, f"worker {pid} outlived its gateway"
