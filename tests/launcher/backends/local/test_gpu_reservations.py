"""The table of reservations: who holds which GPU, who waits, and whose reservation is over."""

import multiprocessing
import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_launcher.backends.local import gpu_reservations
from flotilla_launcher.backends.local.gpu_reservations import GpuReservations
from flotilla_launcher.backends.ports import BackendError, DeviceClaim
from tests.launcher.backends.local.queueing import gpu_name


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    monkeypatch.setattr(gpu_reservations, "SHARED_MEMORY", tmp_path)
    yield tmp_path / f"flotilla-gpus-{os.geteuid()}"


def claim(run_id: str, count: int = 1, priority: int = 0, submitted: float = 0.0) -> DeviceClaim:
    return DeviceClaim(run_id, count, priority, submitted)


def test_a_replica_has_the_same_gpus_on_every_start_and_no_other_run_has_them(table: Path) -> None:
    here = GpuReservations("/runs", ["0", "1", "2"])
    assert here.claim_gpus(claim("a", 2)) is None
    assert here.claim_gpus(claim("b")) is None
    given = here.assign_gpus("a", "rollout-0", 1)
    assert here.assign_gpus("a", "learner-0", 1) != given
    assert here.assign_gpus("b", "rollout-0", 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert here.assign_gpus("a", "rollout-0", 1) == given
    assert here.assign_gpus("a", "env_gateway-0", 0) == {}
    with pytest.raises(BackendError, match="rollout-1 needs 1 GPU, 0 are reserved"):
        here.assign_gpus("a", "rollout-1", 1)


def test_the_queue_is_by_priority_then_submission_and_nobody_overtakes(table: Path) -> None:
    here = GpuReservations("/runs", ["0", "1"])
    assert here.claim_gpus(claim("holder")) is None
    large, urgent = claim("large", 2, submitted=1.0), claim("urgent", 2, 7, submitted=3.0)
    small = claim("small", 1, submitted=2.0)
    for each in (large, small, urgent):
        assert here.claim_gpus(each) is not None
    places = {each.run_id: here.claim_gpus(each) for each in (large, small, urgent)}
    assert {name: at and at.place for name, at in places.items()} == {
        "urgent": 1,
        "large": 2,
        "small": 3,
    }
    refused = here.claim_gpus(replace(claim("newcomer", submitted=9.0), waits=False))
    assert refused is not None and "run small waits before it" in refused.reason
    here.release_gpus("holder")
    assert here.claim_gpus(large) is not None
    assert here.claim_gpus(urgent) is None
    here.release_gpus("urgent")
    here.release_gpus("large")
    assert here.claim_gpus(small) is None, "a run that left the queue blocks nobody"


def test_those_that_wait_for_other_gpus_are_not_ahead(table: Path) -> None:
    left, right = GpuReservations("/left", ["0"]), GpuReservations("/right", ["1"])
    assert left.claim_gpus(claim("a")) is None
    assert left.claim_gpus(claim("b", submitted=1.0)) is not None
    assert right.claim_gpus(claim("c", submitted=2.0)) is None


def test_a_smaller_claim_frees_what_no_replica_has(table: Path) -> None:
    here = GpuReservations("/runs", ["0", "1"])
    assert here.claim_gpus(claim("a", 2)) is None
    assert here.claim_gpus(claim("b")) is not None
    assert here.claim_gpus(claim("a", 1)) is None
    assert here.claim_gpus(claim("b")) is None


def _claim_and_die(folder: Path, gpu: str, waits: bool) -> None:
    gpu_reservations.SHARED_MEMORY = folder
    GpuReservations("/dead", [gpu]).claim_gpus(claim("waiting" if waits else "holding"))
    os._exit(0)


@pytest.mark.parametrize("waits", [False, True])
def test_the_reservation_of_a_dead_owner_is_over(tmp_path: Path, table: Path, waits: bool) -> None:
    gpu = gpu_name()
    here = GpuReservations("/runs", [gpu])
    if waits:
        assert here.claim_gpus(claim("mine")) is None
    dead = multiprocessing.get_context("spawn").Process(
        target=_claim_and_die, args=(tmp_path, gpu, waits)
    )
    dead.start()
    dead.join()
    here.release_gpus("mine")
    assert here.claim_gpus(claim("next", submitted=1.0)) is None


def test_a_folder_that_others_may_write_is_not_used(table: Path) -> None:
    table.mkdir()
    table.chmod(0o777)
    with pytest.raises(BackendError, match=r"is not theirs: remove it"):
        GpuReservations("/runs", ["0"]).claim_gpus(claim("a"))
