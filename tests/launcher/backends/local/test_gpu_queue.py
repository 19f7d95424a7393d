"""A GPU belongs to a run until it ends: real launchers and services, and the name of one GPU."""

import asyncio
import json
import os
import signal
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from tests.launcher.backends.local.queueing import (
    gpu_name,
    gpus_seen,
    is_running,
    machine,
    rollouts,
    wish,
)
from tests.support.launcher import left_running
from tests.support.waiting import until


async def test_a_run_survives_crashes_while_others_wait_in_order_across_launchers(
    tmp_path: Path,
) -> None:
    gpu = gpu_name()
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        run = await here.running(first)
        later = await here.start(wait=True)
        urgent = await here.start(wait=True, priority=5)
        await here.until(later, lambda r: r.queue_place == 2)
        waiting = await here.until(urgent, lambda r: r.queue_place == 1)
        assert waiting.state == pb.RUN_STATE_QUEUED
        assert f"run {first} holds GPU {gpu}" in waiting.waiting
        for crash in (1, 2, 3):
            [rollout] = rollouts(run)
            assert gpus_seen(rollout) == gpu
            os.kill(rollout.pid, signal.SIGKILL)
            await here.until(first, lambda r: not is_running(r))
            if crash == 2:
                # In the pause before the restart nothing but the reservation holds the GPU.
                await here.kill_launcher()
                await here.launch()
            run = await here.running(first)
            assert await here.places(urgent, later) == [1, 2], f"after crash {crash}"
        await here.stop(first)
        assert gpus_seen(rollouts(await here.running(urgent))[0]) == gpu
        # Each waiting run looks at the queue by itself.
        await here.until(later, lambda r: r.queue_place == 1)
        assert not (here.runs / later).exists(), "it has not begun"
        await here.stop(urgent)
        await here.running(later)
        await here.stop(later)


async def test_a_newcomer_that_does_not_wait_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    gpu = gpu_name()
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        run = await here.running(first)
        os.kill(rollouts(run)[0].pid, signal.SIGKILL)
        why = await here.refused(request_id="x")
        assert why.startswith(f"needs 1 GPU, 0 of 1 are free: run {first} holds GPU {gpu}.")
        assert "--wait" in why and "\n" not in why
        assert here.known_runs() == {first}
        assert [path.name for path in here.runs.glob("fake-*")] == [first]
        # The same request may wait instead.
        second = await here.start(request_id="x", wait=True)
        why = await here.refused()
        assert f"run {second} waits before it" in why
        await here.stop(second)
        assert here.known_runs() == {first}, "a run that never began leaves nothing"
        await here.running(first)


async def test_a_dead_launchers_gpu_is_kept_while_its_services_live_and_then_freed(
    tmp_path: Path,
) -> None:
    gpu = gpu_name()
    async with machine(tmp_path / "one", gpu) as one, machine(tmp_path / "two", gpu) as two:
        first = await one.start()
        await one.running(first)
        await one.kill_launcher()
        why = await two.refused()
        assert f"run {first} in {one.runs}, whose launcher is gone, holds GPU {gpu}" in why
        second = await two.start(wait=True)
        await two.until(second, lambda r: r.queue_place == 1)
        for process in await asyncio.to_thread(left_running, one.runs):
            process.send_signal(signal.SIGKILL)
        await two.running(second)
        # The run that lost its GPU continues once it has one again.
        await one.launch()
        waiting = await one.until(first, lambda r: r.state == pb.RUN_STATE_QUEUED)
        assert f"run {second} in {two.runs} holds GPU {gpu}" in waiting.waiting
        await two.stop(second)
        await one.running(first)


async def test_a_replica_that_is_scaled_away_frees_its_gpu_and_none_is_added_without(
    tmp_path: Path,
) -> None:
    gpus = [gpu_name(), gpu_name()]
    async with machine(tmp_path / "runs", ",".join(gpus)) as here:
        first = await here.start()
        await here.running(first)
        await here.scale(first, 2)
        run = await here.until(first, lambda r: len(rollouts(r)) == 2)
        assert sorted(map(gpus_seen, rollouts(run))) == sorted(gpus)
        second = await here.start(wait=True)
        await here.until(second, lambda r: r.queue_place == 1)
        await here.scale(first, 1)
        await here.running(second)
        try:
            await here.scale(first, 2)
        except Exception as error:  # noqa: BLE001
            assert f"run {second} holds GPU" in str(error)
        else:
            raise AssertionError("a replica without a GPU was added")
        assert len(rollouts(await here.running(first))) == 1


async def test_runs_that_wait_outlive_the_end_of_their_launcher(tmp_path: Path) -> None:
    gpu = gpu_name()
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        await here.running(first)
        waiting = await here.start(wait=True)
        assert here.process is not None
        here.process.send_signal(signal.SIGTERM)
        await here.process.wait()
        assert await asyncio.to_thread(left_running, here.runs) == []
        await here.launch()
        assert (await here.get(first)).state == pb.RUN_STATE_STOPPED
        await here.running(waiting)


async def test_more_gpus_than_the_machine_has_are_refused_though_the_run_would_wait(
    tmp_path: Path,
) -> None:
    async with machine(tmp_path / "runs", gpu_name()) as here:
        spec_json = json.dumps(wish(launcher={"rollout": {"gpus": 1, "replicas": 2}}))
        try:
            await here.start(spec_json=spec_json, wait=True)
        except Exception as error:  # noqa: BLE001
            assert "the run needs 2 GPUs, this machine has 1" in str(error)
        else:
            raise AssertionError("it would wait for ever")
        await until(lambda: here.known_runs() == set())
