"""Ids of new runs, and runs that are refused or annotated at the start."""

import os
from pathlib import Path

import grpc.aio
import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.config.tinker_rules import LIMITS
from tests.support.launcher import serving, spec


async def test_b52_a_new_run_never_takes_a_folder_or_link_that_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    async with serving(runs) as served:
        first = await served.start(spec())
        await served.ended(first)
        # Independent of the clock, the next ids are all taken by links to another place.
        base = first.rpartition("-")[0]
        for second in range(60):
            (runs / f"{base}-{int(first[-6:]) + second + 1:06d}").symlink_to(outside)
        run_id = await served.start(spec())
        await served.ended(run_id)
    assert not (runs / run_id).is_symlink()
    assert os.listdir(outside) == []


async def test_a_run_at_a_tinker_service_needs_a_key_and_says_what_it_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = spec(learner={"engine": "tinker"})
    async with serving(tmp_path) as served:
        monkeypatch.setenv("TINKER_API_KEY", " ")
        with pytest.raises(grpc.aio.AioRpcError, match="TINKER_API_KEY is not set"):
            await served.start(wish)
        monkeypatch.setenv("TINKER_API_KEY", "tml-for-tests")
        run_id = await served.start(wish)
        await served.ended(run_id)
        request = pb.WatchRunRequest(run_id=run_id)
        notes = [event.message async for event in served.runs.WatchRun(request) if event.message]
        assert [f'learner.engine = "tinker": {limit}' for limit in LIMITS] == notes[: len(LIMITS)]
        # Its checkpoints are at the service: no other engine can go on with them.
        (tmp_path / run_id / "journal.sqlite").touch()
        with pytest.raises(grpc.aio.AioRpcError, match="those who trained it"):
            await served.start(spec(learner={"steps": 3}), resume_run_id=run_id)
