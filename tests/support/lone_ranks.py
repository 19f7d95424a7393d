"""Ranks without a service: each a process that runs one function and reports what it returns."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.rank_setup import DTYPES, RankSetup
from flotilla_learner.rank.sharding import ShardLayout

SPAWNED = multiprocessing.get_context("spawn")


def start_alone(
    rank: Callable[[dict[str, Any], Connection], None],
    policy: PolicyConfig,
    config: LearnerConfig,
    folder: Path,
    meeting: str = "",
) -> list[Any]:
    """Start the configured processes, each with its setup as JSON; return the report of each. They
    meet in a file, or at the address `meeting`."""
    folder.mkdir(exist_ok=True)
    processes = config.rank.processes
    meeting = meeting or f"file://{folder}/meeting-{rank.__name__}"
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

    def make_rank(index: int, report: Connection) -> BaseProcess:
        given = {**setup, "place": {**place, "index": index, "slot": index}}
        return SPAWNED.Process(target=rank, args=(given, report))

    return collect_reports(processes, make_rank)


def collect_reports(count: int, make_rank: Callable[[int, Connection], BaseProcess]) -> list[Any]:
    """Start the processes that `make_rank` makes; return what each sends through the pipe that it
    is given. If one ends without, raise EOFError and end them all."""
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for index in range(count):
            here, there = multiprocessing.Pipe(duplex=False)
            pipes.append(here)
            processes.append(make_rank(index, there))
            processes[-1].start()
            # Open here, or inherited by the next fork, it would hide that its process has ended.
            there.close()
        return _receive_reports(pipes)
    except EOFError:  # The others may wait for the one that ended.
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()


def _receive_reports(pipes: Sequence[Connection]) -> list[Any]:
    """Return what comes through each pipe, whichever comes first."""
    reports: dict[int, Any] = {}
    while missing := [index for index in range(len(pipes)) if index not in reports]:
        wait(pipes[index] for index in missing)
        for index in missing:
            if pipes[index].poll():
                try:
                    reports[index] = pipes[index].recv()
                except EOFError as error:
                    raise EOFError(f"rank {index} ended without a report") from error
    return [reports[index] for index in range(len(pipes))]


def join_ranks(setup: RankSetup, device: torch.device) -> ShardLayout:
    """Join the other ranks; return the split over all of them, even over one."""
    Replicas.join_process_group(setup.place, device)
    dtype, offload = DTYPES[setup.policy.dtype], setup.rank.offload_optimizer
    return ShardLayout.over_ranks(setup.place, device, dtype, offload=offload)
