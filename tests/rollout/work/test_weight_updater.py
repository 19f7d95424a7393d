"""New weights: fetched, checked before use, loaded, reported; old ones kept when anything fails."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla.learner.v1 import policy_pb2
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import policy_service_pb2_grpc as policy_grpc
from flotilla.learner.v1 import weight_service_pb2_grpc as weight_grpc
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.made_pictures import noise_picture
from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import (
    TensorEntry,
    TokenizerDigests,
    checksum64,
    compute_fingerprint,
)
from flotilla_common.wire.policy import encode_policy
from flotilla_rollout.adapters.fake import LOGPROB, FakeEngine
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.policy_feed import PolicyClient
from flotilla_rollout.ports import EngineDead, EngineError, TransportFailed, WeightsTorn
from flotilla_rollout.types import Publication
from flotilla_rollout.work.weight_updater import WeightUpdater
from tests.support.fake_peers import TOKEN, FakeLearner, FakeWeights, served
from tests.support.rollout import engine, turns
from tests.support.waiting import until

IDENTITY = WorkerIdentity("rollout-0", "incarnation", 1, TokenizerDigests(b"d" * 32))
TOTAL = 12_345
SHAPE = (3, 1000)


def publication(path: Path, version: int, **changes: Any) -> policy_pb.Update:
    """Random weights on disk, and how a learner announces them."""
    data = np.random.default_rng(version).integers(0, 256, TOTAL, dtype=np.uint8)
    data.tofile(path)
    entry = TensorEntry("w", "float32", SHAPE, 64, checksum64(data[64 : 64 + 12_000]))
    policy = PolicyId(1, version, compute_fingerprint([entry], TOTAL))
    row = policy_pb2.TensorEntry(
        name="w", dtype="float32", shape=SHAPE, offset_bytes=64, checksum=entry.checksum
    )
    fields: dict[str, Any] = {
        "policy": encode_policy(policy),
        "manifest": policy_pb2.WeightManifest(tensors=[row], total_bytes=TOTAL),
        "transport": policy_pb.TRANSPORT_SHM,
        "location": str(path),
        "canary_token_ids": np.arange(5, dtype="<i4").tobytes(),
        "publish_timeout": rpc.to_duration(5.0),
    }
    return policy_pb.Update(**(fields | changes))


class RecordingEngine(FakeEngine):
    """Keeps the bytes that it was given; slow for `seconds_to_load`."""

    seconds_to_load = 0.0
    refusal: Exception | None = None

    async def receive_weights(self, publication: Publication) -> None:
        if self.refusal is not None:
            raise self.refusal
        await super().receive_weights(publication)

    async def load_weights(self, publication: Publication, path: Path) -> None:
        self.bytes = await asyncio.to_thread(path.read_bytes)
        await asyncio.sleep(self.seconds_to_load)
        await super().load_weights(publication, path)


@dataclass
class UpdaterSetup:
    learner: FakeLearner
    engine: RecordingEngine
    staged: Path
    follower: WeightUpdater
    running: "asyncio.Task[None]"

    def outcomes(self) -> list[tuple[int, str]]:
        name = policy_pb.UpdateOutcome.Name
        prefix = "UPDATE_OUTCOME_"
        return [
            (report.policy.version, name(report.outcome).removeprefix(prefix))
            for report in self.learner.reports
        ]


def list_staged(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("staged*")]


@asynccontextmanager
async def following(
    tmp_path: Path, learner: FakeLearner, *, patience_s: float = 0.0
) -> AsyncGenerator[UpdaterSetup]:
    fake = engine(turns("x"))
    fake.__class__ = RecordingEngine
    assert isinstance(fake, RecordingEngine)
    fake.policy = None

    def add(server: grpc.aio.Server) -> None:
        group_grpc.add_GroupServiceServicer_to_server(learner, server)
        policy_grpc.add_PolicyServiceServicer_to_server(learner, server)

    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        feed = PolicyClient(
            channel, IDENTITY, RunEpoch(), weights=partial(rpc.channel, token=TOKEN)
        )
        staged = tmp_path / "staged"
        follower = WeightUpdater(feed, fake, staged, patience_s=patience_s)
        task = asyncio.create_task(follower.keep_updating())
        try:
            yield UpdaterSetup(learner, fake, staged, follower, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not list_staged(tmp_path), "staged weights were left behind"


async def test_weights_in_shared_memory_are_checked_loaded_and_reported(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0))
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(0, "APPLIED")]
        assert it.engine.bytes == (tmp_path / "v0").read_bytes()
        scores = np.frombuffer(it.learner.reports[0].canary_logprobs, "<f4")
        assert scores.tolist() == [LOGPROB] * 4
        assert it.learner.attached[0].transports[0] == policy_pb.TRANSPORT_SHM


async def test_weights_over_grpc_are_resumed_where_the_stream_broke(tmp_path: Path) -> None:
    update = publication(tmp_path / "v0", 0)
    weights = FakeWeights((tmp_path / "v0").read_bytes(), cut_after=4000, cuts=2)

    def add(server: grpc.aio.Server) -> None:
        weight_grpc.add_WeightServiceServicer_to_server(weights, server)

    async with served(add) as address, following(tmp_path, FakeLearner()) as it:
        update.transport = policy_pb.TRANSPORT_GRPC
        update.location = address
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(0, "APPLIED")]
        assert it.engine.bytes == (tmp_path / "v0").read_bytes()
        assert weights.offsets == [0, 4000, 8000]


async def test_weights_are_kept_for_the_next_while_the_learner_requests_it(tmp_path: Path) -> None:
    kept: list[bool] = []
    async with following(tmp_path, FakeLearner()) as it:
        for version, keep in enumerate((True, True, False, False)):
            update = publication(tmp_path / "weights", version, keep=keep)
            weights = FakeWeights((tmp_path / "weights").read_bytes(), cut_after=0, cuts=0)
            add = partial(weight_grpc.add_WeightServiceServicer_to_server, weights)
            async with served(add) as address:
                update.transport, update.location = policy_pb.TRANSPORT_GRPC, address
                it.learner.updates.put_nowait(update)
                await until(lambda expected=version: len(it.learner.reports) > expected)
            assert it.engine.bytes == (tmp_path / "weights").read_bytes()
            assert weights.held == [version - 1 if version in (1, 2) else None]
            kept.append(it.staged.with_name("staged.kept").exists())
        assert [outcome for _, outcome in it.outcomes()] == ["APPLIED"] * 4
    assert kept == [True, True, False, False]


async def test_bytes_that_differ_are_refused_before_the_engine_sees_them(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0))
        await until(lambda: it.learner.reports)
        update = publication(tmp_path / "v1", 1)
        damaged = bytearray((tmp_path / "v1").read_bytes())
        damaged[100] ^= 1
        (tmp_path / "v1").write_bytes(damaged)
        it.learner.updates.put_nowait(update)
        await until(lambda: len(it.learner.reports) == 2)
        assert it.outcomes()[1] == (1, "FINGERPRINT_MISMATCH")
        assert "tensor w" in it.learner.reports[1].detail
        assert [policy.version for policy in it.engine.loaded] == [0]


@pytest.mark.parametrize("cut", [0, 64, 12_000])
async def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        update = publication(tmp_path / "v0", 0)
        (tmp_path / "v0").write_bytes((tmp_path / "v0").read_bytes()[:cut])
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(0, "FINGERPRINT_MISMATCH")]


async def test_a_manifest_of_another_policy_is_refused(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        update = publication(tmp_path / "v0", 0)
        update.policy.fingerprint = b"x" * 32
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(0, "FINGERPRINT_MISMATCH")]


async def test_weights_that_are_not_there_leave_the_old_ones(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0))
        await until(lambda: it.learner.reports)
        update = publication(tmp_path / "v1", 1)
        (tmp_path / "v1").unlink()
        it.learner.updates.put_nowait(update)
        await until(lambda: len(it.learner.reports) == 2)
        assert it.outcomes()[1] == (1, "TRANSPORT_FAILED")
        assert it.engine.policy is not None
        assert it.engine.policy.version == 0


async def test_only_the_newest_of_what_is_announced_meanwhile_is_loaded(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.engine.seconds_to_load = 0.2
        for version in range(5):
            it.learner.updates.put_nowait(publication(tmp_path / f"v{version}", version))
            await asyncio.sleep(0.02)
        await until(lambda: it.engine.loaded and it.engine.loaded[-1].version == 4)
        assert [policy.version for policy in it.engine.loaded] == [0, 4]


async def test_a_cut_stream_is_attached_again_with_what_is_held(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        update = publication(tmp_path / "v0", 0)
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        it.learner.updates.put_nowait(None)
        await until(lambda: len(it.learner.attached) == 2)
        assert it.learner.attached[1].holding == update.policy
        it.learner.updates.put_nowait(update)
        await until(lambda: len(it.learner.reports) == 2)
        assert len(it.engine.loaded) == 1, "held weights were loaded again"


async def test_what_a_replaced_learner_announces_is_ignored(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.engine.policy = PolicyId(1, 5, b"5" * 32)
        it.learner.updates.put_nowait(publication(tmp_path / "v2", 2))
        it.learner.updates.put_nowait(publication(tmp_path / "v6", 6))
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(6, "APPLIED")]


async def test_a_file_that_a_killed_predecessor_left_is_removed(tmp_path: Path) -> None:
    for name in ("staged", "staged.kept"):
        (tmp_path / name).write_bytes(b"weights")
    async with following(tmp_path, FakeLearner()):
        await until(lambda: not list_staged(tmp_path))


async def test_weights_are_settled_only_once_their_canary_is_judged(tmp_path: Path) -> None:
    class SlowEngine(RecordingEngine):
        async def compute_logprobs(
            self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
        ) -> NDArray[np.float32]:
            await asyncio.sleep(0.3)
            return await super().compute_logprobs(token_ids, pictures)

    async with following(tmp_path, FakeLearner()) as it:
        it.engine.__class__ = SlowEngine
        await it.follower.wait_until_judged()
        it.learner.updates.put_nowait(publication(tmp_path / "v1", 1))
        await until(lambda: it.engine.policy is not None)
        waiting = asyncio.create_task(it.follower.wait_until_judged())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await until(waiting.done)
        assert it.outcomes() == [(1, "APPLIED")]


async def test_weights_whose_canary_cannot_be_scored_end_the_worker(tmp_path: Path) -> None:
    class Mute(RecordingEngine):
        async def compute_logprobs(
            self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
        ) -> NDArray[np.float32]:
            raise EngineError("no logprobs")

    async with following(tmp_path, FakeLearner()) as it:
        it.engine.__class__ = Mute
        it.learner.updates.put_nowait(publication(tmp_path / "v1", 1))
        with pytest.raises(EngineDead, match="could not be scored"):
            await asyncio.wait_for(asyncio.shield(it.running), 5.0)
        assert it.outcomes() == [(1, "ENGINE_FAILED")]


async def test_an_engine_that_does_not_answer_the_canary_ends_the_worker(tmp_path: Path) -> None:
    class Stopped(RecordingEngine):
        async def compute_logprobs(
            self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
        ) -> NDArray[np.float32]:
            return await asyncio.Future()

    async with following(tmp_path, FakeLearner()) as it:
        it.engine.__class__ = Stopped
        brief = publication(tmp_path / "v1", 1, publish_timeout=rpc.to_duration(2.0))
        it.learner.updates.put_nowait(brief)
        with pytest.raises(EngineDead, match="could not be scored: no answer after 2 s"):
            await asyncio.wait_for(asyncio.shield(it.running), 30.0)
        assert it.outcomes() == [(1, "ENGINE_FAILED")]


async def test_a_service_that_answers_the_canary_late_is_waited_for(tmp_path: Path) -> None:
    class Late(RecordingEngine):
        async def compute_logprobs(
            self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
        ) -> NDArray[np.float32]:
            await asyncio.sleep(0.5)
            return await super().compute_logprobs(token_ids, pictures)

    async with following(tmp_path, FakeLearner(), patience_s=60.0) as it:
        it.engine.__class__ = Late
        brief = publication(tmp_path / "v1", 1, publish_timeout=rpc.to_duration(0.2))
        it.learner.updates.put_nowait(brief)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(1, "APPLIED")]


async def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    update = publication(tmp_path / "v1", 1)
    update.manifest.tensors[0].dtype = "F32"
    row = update.manifest.tensors[0]
    entry = TensorEntry(row.name, row.dtype, SHAPE, row.offset_bytes, row.checksum)
    update.policy.fingerprint = compute_fingerprint([entry], TOTAL)
    async with following(tmp_path, FakeLearner()) as it:
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(1, "FINGERPRINT_MISMATCH")]
        assert "F32" in it.learner.reports[0].detail


async def test_a_canary_that_disagrees_ends_the_worker(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner(accept=False)) as it:
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0))
        with pytest.raises(EngineDead, match="canary"):
            await asyncio.wait_for(asyncio.shield(it.running), 5.0)


def test_policies_are_ordered_by_epoch_then_version() -> None:
    older = PolicyId(1, 9, b"a")
    assert older < PolicyId(2, 3, b"b")
    assert older < replace(older, version=10)
    assert older.label == "1:9"


async def test_held_weights_are_loaded_again_when_they_are_not_to_be_trusted(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0))
        await until(lambda: it.learner.reports)
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0, reload=True))
        await until(lambda: len(it.learner.reports) == 2)
        assert [policy.version for policy in it.engine.loaded] == [0, 0]
        assert it.outcomes() == [(0, "APPLIED"), (0, "APPLIED")]


async def test_probes_are_sampled_and_reported_with_their_logprobs(tmp_path: Path) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        prompt = np.arange(3, dtype="<i4").tobytes()
        requests = [
            policy_pb.Probe(prompt_token_ids=prompt, max_tokens=count, temperature=1.0, seed=1)
            for count in (1, 8)
        ]
        it.learner.updates.put_nowait(publication(tmp_path / "v0", 0, probes=requests))
        await until(lambda: it.learner.reports)
        answers = it.learner.reports[0].probes
        sampled = [len(answer.token_ids) // 4 for answer in answers]
        assert sampled[0] == 1 < sampled[1]
        for answer, count in zip(answers, sampled, strict=True):
            assert np.frombuffer(answer.logprobs, "<f4").tolist() == [LOGPROB] * count


@pytest.mark.parametrize(
    ("refusal", "outcome", "detail"),
    [
        (None, "APPLIED", ""),
        (TransportFailed("no sender"), "TRANSPORT_FAILED", "no sender"),
        (WeightsTorn("cut off"), "ENGINE_FAILED", "cut off"),
    ],
)
async def test_weights_that_are_sent_are_reported_as_the_engine_took_them(
    tmp_path: Path, refusal: Exception | None, outcome: str, detail: str
) -> None:
    async with following(tmp_path, FakeLearner()) as it:
        it.engine.refusal = refusal
        update = publication(tmp_path / "v0", 0)
        update.transport, update.location = policy_pb.TRANSPORT_GLOO, "127.0.0.1:1"
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(0, outcome)]
        assert it.learner.reports[0].detail == detail
        # Weights that are loaded whole repair a failed update.
        it.learner.updates.put_nowait(publication(tmp_path / "v1", 1))
        await until(lambda: len(it.learner.reports) == 2)
        assert it.outcomes()[1] == (1, "APPLIED")


async def test_the_canary_is_scored_with_its_picture(tmp_path: Path) -> None:
    seen: list[Sequence[ShownPicture]] = []

    class Seeing(RecordingEngine):
        async def compute_logprobs(
            self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
        ) -> NDArray[np.float32]:
            seen.append(pictures)
            return await super().compute_logprobs(token_ids, pictures)

    async with following(tmp_path, FakeLearner()) as it:
        it.engine.__class__ = Seeing
        update, noise = publication(tmp_path / "v1", 1), noise_picture()
        update.canary_pictures.add(data=noise.data, token_offset=3, grid=[1, 4, 6])
        it.learner.updates.put_nowait(update)
        await until(lambda: it.learner.reports)
        assert it.outcomes() == [(1, "APPLIED")]
    ((shown,),) = seen
    assert shown == ShownPicture(noise, PlacedPicture(noise.sha256, (1, 4, 6), 3))
