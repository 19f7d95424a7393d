"""Ranks without a service: each a process that runs one function and reports what it returns."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from services.common.spec import PolicyConfig
from services.learner.config.learner import LearnerConfig
from services.learner.rank.data_parallel import Replicas
from services.learner.rank.rank_setup import DTYPES, RankSetup
from services.learner.rank.sharding import ShardLayout

SPAWNED = multiprocessing.get_context("spawn")


def start_alone(
    rank: Callable[[dict[str, Any], Connection], None],
    policy: PolicyConfig,
    config: LearnerConfig,
    folder: Path,
) -> list[Any]:
    """Start the configured processes, each with its setup as JSON; return the report of each."""
    folder.mkdir(exist_ok=True)
    processes = config.rank.processes
    meeting = f"file://{folder}/meeting-{rank.__name__}"
    place = {"count": processes, "rendezvous": meeting, "slots": processes}
    setup = {
        "name": "part",
        "shm_dir": str(folder),
        "total_steps": 1,
        "policy": policy.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "optimizer": config.optimizer.model_dump(mode="json"),
        "rank": config.rank.model_dump(mode="json"),
    }
    pipes = [SPAWNED.Pipe(duplex=False) for _ in range(processes)]
    ranks = [
        SPAWNED.Process(
            target=rank,
            args=({**setup, "place": {**place, "index": index, "slot": index}}, there),
        )
        for index, (_, there) in enumerate(pipes)
    ]
    return collect_reports(ranks, pipes)


def collect_reports(
    processes: Sequence[BaseProcess], pipes: Sequence[tuple[Connection, Connection]]
) -> list[Any]:
    """Start the processes; return what each sends through its pipe. If one ends without, raise
    EOFError and end them all."""
    for process in processes:
        process.start()
    try:
        return _receive_reports(processes, [here for here, _ in pipes])
    except EOFError:  # The others may wait for the one that ended.
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _receive_reports(processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> list[Any]:
    reports: dict[int, Any] = {}
    while missing := [index for index in range(len(processes)) if index not in reports]:
        wait(each for index in missing for each in (pipes[index], processes[index].sentinel))
        for index in missing:
            # Before the pipe: a process may send its report and end in between.
            ended = not processes[index].is_alive()
            if pipes[index].poll():
                reports[index] = pipes[index].recv()
            elif ended:
                raise EOFError(f"rank {index} ended without a report")
    return [reports[index] for index in range(len(processes))]


def join_ranks(setup: RankSetup, device: torch.device) -> ShardLayout:
    """Join the other ranks; return the split over all of them, even over one."""
    Replicas.join_process_group(setup.place, device)
    dtype, offload = DTYPES[setup.policy.dtype], setup.rank.offload_optimizer
    return ShardLayout.over_ranks(setup.place, device, dtype, offload=offload)
