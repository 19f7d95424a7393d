"""PolicyService against a real client over a socket."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from flotilla.learner.v1 import policy_service_pb2 as pb
from flotilla_common.images.made_pictures import noise_picture
from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.process.host_identity import host_digest
from flotilla_common.rpc import rpc
from flotilla_learner.types import Publication
from tests.learner.guard.test_probes import SlowRanks
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, FakeWorker, learner, make_config


def attach_request(worker: FakeWorker, **changes: object) -> pb.AttachRequest:
    request = pb.AttachRequest(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        device_count=1,
        transports=[pb.TRANSPORT_SHM],
        host_digest=host_digest(),
        tokenizer_digest=TOKENIZER,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def report(worker: FakeWorker, update: pb.Update, *, logprob: float) -> pb.ReportPolicyRequest:
    canary = np.full(len(update.canary_token_ids) // 4 - 1, logprob, dtype="<f4")
    return pb.ReportPolicyRequest(
        worker_id=worker.worker_id,
        policy=update.policy,
        canary_logprobs=canary.tobytes(),
        outcome=pb.UPDATE_OUTCOME_APPLIED,
    )


async def refusal_of(call: object) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    error = rpc.service_error(caught.value)
    assert error is not None
    return error.reason


def _size(path: str) -> int:
    return Path(path).stat().st_size


async def test_a_worker_that_attaches_gets_the_newest_policy(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = FakeWorker(running.address)
        stream = worker.policies.Attach(attach_request(worker))
        response = await asyncio.wait_for(anext(aiter(stream)), 10)
        assert response.update.policy.version == 0
        assert response.update.transport == pb.TRANSPORT_SHM
        assert _size(response.update.location) == response.update.manifest.total_bytes
        stream.cancel()
        await worker.channel.close()


@pytest.mark.parametrize(
    ("network", "transports", "chosen"),
    [
        ("private", [pb.TRANSPORT_SHM], pb.TRANSPORT_SHM),
        ("public", [pb.TRANSPORT_SHM, pb.TRANSPORT_GRPC], pb.TRANSPORT_GRPC),
        ("public", [pb.TRANSPORT_SHM], None),
    ],
)
async def test_over_a_public_network_weights_go_by_grpc_alone(
    tmp_path: Path,
    network: str,
    transports: list[pb.Transport.ValueType],
    chosen: pb.Transport.ValueType | None,
) -> None:
    config = make_config(tmp_path, weights={"network": network})
    async with learner(tmp_path, config, weight_server="192.0.2.9:7") as running:
        worker = FakeWorker(running.address)
        request = attach_request(worker)
        request.ClearField("transports")
        request.transports.extend(transports)
        updates = aiter(stream := worker.policies.Attach(request))
        # The first is a late joiner's, which uses WeightService where it can.
        if chosen is None:
            assert await refusal_of(anext(updates)) == "NO_COMMON_TRANSPORT"
        else:
            update = (await asyncio.wait_for(anext(updates), 10)).update
            assert update.transport == chosen
            assert (update.location == "192.0.2.9:7") == (chosen == pb.TRANSPORT_GRPC)
        stream.cancel()
        await worker.channel.close()


@pytest.mark.parametrize(
    ("weights", "host", "transports", "kept"),
    [
        ({"network": "public"}, host_digest(), [pb.TRANSPORT_GRPC], True),
        ({"network": "public", "delta": "off"}, host_digest(), [pb.TRANSPORT_GRPC], False),
        ({"transfer": "off"}, b"elsewhere", [pb.TRANSPORT_GRPC], True),
        ({}, host_digest(), [pb.TRANSPORT_SHM, pb.TRANSPORT_GRPC], False),
        ({}, b"elsewhere", [pb.TRANSPORT_GLOO, pb.TRANSPORT_GRPC], False),
    ],
)
async def test_a_worker_that_fetches_all_publications_is_to_keep_them(
    tmp_path: Path,
    weights: dict[str, str],
    host: bytes,
    transports: list[pb.Transport.ValueType],
    kept: bool,
) -> None:
    config = make_config(tmp_path, weights=weights)
    async with learner(tmp_path, config, weight_server="192.0.2.9:7") as running:
        worker = FakeWorker(running.address)
        request = attach_request(worker, host_digest=host)
        request.ClearField("transports")
        request.transports.extend(transports)
        updates = aiter(stream := worker.policies.Attach(request))
        update = (await asyncio.wait_for(anext(updates), 10)).update
        assert (update.transport, update.keep) == (pb.TRANSPORT_GRPC, kept)
        stream.cancel()
        await worker.channel.close()


async def test_a_canarys_picture_travels_with_it(tmp_path: Path) -> None:
    noise = noise_picture()
    shown = ShownPicture(noise, PlacedPicture(noise.sha256, (1, 4, 4), 2))

    class Seeing(FakeRanks):
        async def publish_weights(self, version: int) -> Publication:
            return replace(await super().publish_weights(version), canary_pictures=(shown,))

    ranks = Seeing(tmp_path / "weights")
    async with learner(tmp_path, make_config(tmp_path), ranks) as running:
        worker = FakeWorker(running.address)
        stream = worker.policies.Attach(attach_request(worker))
        response = await asyncio.wait_for(anext(aiter(stream)), 10)
        (sent,) = response.update.canary_pictures
        assert (sent.data, sent.token_offset, list(sent.grid)) == (noise.data, 2, [1, 4, 4])
        stream.cancel()
        await worker.channel.close()


async def test_a_canary_that_differs_is_refused_and_the_policy_sent_again(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = FakeWorker(running.address)
        stream = aiter(call := worker.policies.Attach(attach_request(worker)))
        first = (await asyncio.wait_for(anext(stream), 10)).update
        refused = await worker.policies.ReportPolicy(report(worker, first, logprob=-1.01))
        assert not refused.accepted
        again = (await asyncio.wait_for(anext(stream), 10)).update
        assert again.policy == first.policy
        accepted = await worker.policies.ReportPolicy(report(worker, again, logprob=-1.0005))
        assert accepted.accepted
        call.cancel()
        await worker.channel.close()


async def test_a_verdict_counts_though_the_worker_no_longer_waits_for_it(tmp_path: Path) -> None:
    """Engines are judged one after another: with many, or a large model, that takes minutes."""
    ranks = SlowRanks(tmp_path / "weights")
    async with learner(tmp_path, make_config(tmp_path), ranks) as running, asyncio.timeout(30):
        worker = FakeWorker(running.address)
        stream = aiter(call := worker.policies.Attach(attach_request(worker)))
        update = (await anext(stream)).update
        request = report(worker, update, logprob=-1.0)
        ids, logprobs = np.arange(3, dtype="<i4"), np.full(3, -1.0, dtype="<f4")
        answer = pb.ProbeResult(token_ids=ids.tobytes(), logprobs=logprobs.tobytes())
        request.probes.extend([answer] * len(update.probes))
        reported = worker.policies.ReportPolicy(request)
        await ranks.begun.wait()
        reported.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reported
        await asyncio.sleep(0.2)
        ranks.go_on.set()
        worker.policy.CopyFrom(update.policy)
        while await worker.poll() is None:
            pass
        call.cancel()
        await worker.channel.close()


async def test_strangers_are_refused_with_the_contracts_reasons(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = FakeWorker(running.address)
        other = attach_request(worker, tokenizer_digest=b"x" * 32)
        assert await refusal_of(anext(aiter(worker.policies.Attach(other)))) == "TOKENIZER_MISMATCH"
        remote = attach_request(worker, host_digest=b"elsewhere")
        assert await refusal_of(anext(aiter(worker.policies.Attach(remote)))) == (
            "NO_COMMON_TRANSPORT"
        )
        for ids, reason in ((["x"] * 1025, "MALFORMED_REQUEST"), (["x" * 201], "ID_TOO_LONG")):
            odd = attach_request(worker)
            odd.device_ids.extend(ids)
            assert await refusal_of(anext(aiter(worker.policies.Attach(odd)))) == reason
        unknown = pb.ReportPolicyRequest(worker_id="stranger", outcome=pb.UPDATE_OUTCOME_APPLIED)
        assert await refusal_of(worker.policies.ReportPolicy(unknown)) == "UNKNOWN_WORKER"
        worker.run_epoch = 77
        assert await refusal_of(worker.policies.ReportPolicy(unknown)) == "STALE_EPOCH"
        await worker.channel.close()
