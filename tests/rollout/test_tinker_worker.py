"""A worker at a Tinker service, as a process: from a published address to submitted trajectories,
through an outage of the service."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from transformers import Qwen3Config

from flotilla.env_gateway.v1 import episode_service_pb2_grpc as env_grpc
from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla.learner.v1 import policy_pb2
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import policy_service_pb2_grpc as policy_grpc
from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import compute_fingerprint
from flotilla_common.weights.sampler_reference import write_reference
from flotilla_common.wire.policy import encode_policy
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from tests.rollout.adapters.tinker_turns import COLLECTED, ScriptedTurns, save_weights
from tests.support.fake_peers import TOKEN, FakeGateway, FakeLearner, lease, served
from tests.support.faulty_tinker import faulty_tinker
from tests.support.repository import ROOT
from tests.support.tinker_front import KEY, serving_front
from tests.support.waiting import until
from tests.tinker.work.desk_doubles import ScriptedTrainer

pytestmark = COLLECTED
_LIMIT_S = 100.0


def _write_spec(folder: Path, url: str) -> Path:
    model = folder / "model"
    save_tokenizer(train_tokenizer(["find book hotel"] * 3, 290), model)
    Qwen3Config(vocab_size=384).save_pretrained(model)
    policy = {"model": str(model), "max_model_len": 2048, "tinker": {"url": url}}
    rollout = {"max_input_length": 1024, "max_generate_length": 16, "max_turns": 1}
    spec = {
        "name": "run",
        "policy": policy,
        "learner": {"engine": "tinker"},
        "rollout": rollout | {"renew_interval_s": 0.1, "grade_timeout_s": 1.0},
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def _publish(path: Path, address: str, version: int) -> policy_pb.Update:
    manifest = write_reference(path, address)
    size = path.stat().st_size
    rows = [
        policy_pb2.TensorEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            offset_bytes=entry.offset_bytes,
            checksum=entry.checksum,
        )
        for entry in manifest
    ]
    return policy_pb.Update(
        policy=encode_policy(PolicyId(1, version, compute_fingerprint(manifest, size))),
        manifest=policy_pb2.WeightManifest(tensors=rows, total_bytes=size),
        transport=policy_pb.TRANSPORT_SHM,
        location=str(path),
        canary_token_ids=np.arange(5, 9, dtype="<i4").tobytes(),
        publish_timeout=rpc.to_duration(20.0),
    )


@asynccontextmanager
async def _working(spec: Path, address: str) -> AsyncGenerator[None]:
    """Run a worker with these peers during the block, and drain it."""
    log = spec.with_name("worker.log")
    own = {"FLOTILLA_TOKEN": TOKEN, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    words = ["-m", "flotilla_rollout", "--config", str(spec)]
    words += ["--run-dir", str(spec.with_name("run"))]
    for peer in ("learner", "env_gateway"):
        words += ["--peer", f"{peer}={address}"]
    with log.open("w") as output:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            cwd=ROOT,
            env={**os.environ, **own},
            stdout=output,
            stderr=output,
        )
        try:
            yield
            worker.terminate()
            assert await asyncio.wait_for(worker.wait(), 30.0) == 0, log.read_text()
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()


async def test_trajectories_come_from_a_service_that_was_away_meanwhile(tmp_path: Path) -> None:
    learner, gateway, sampler = FakeLearner(), FakeGateway(), ScriptedTurns()

    def add(server: grpc.aio.Server) -> None:
        group_grpc.add_GroupServiceServicer_to_server(learner, server)
        policy_grpc.add_PolicyServiceServicer_to_server(learner, server)
        env_grpc.add_EpisodeServiceServicer_to_server(gateway, server)

    async with (
        serving_front(tmp_path / "front", ScriptedTrainer(), sampler) as url,
        faulty_tinker(url) as proxy,
        served(add) as address,
    ):
        addresses = await asyncio.to_thread(save_weights, url)
        learner.updates.put_nowait(_publish(tmp_path / "v0", addresses[0], 0))
        async with _working(_write_spec(tmp_path, proxy.url), address):
            await until(lambda: learner.reports, _LIMIT_S)
            scores = np.frombuffer(learner.reports[0].canary_logprobs, "<f4")
            assert scores.tolist() == pytest.approx([-0.06, -0.07, -0.08])
            # The burn-in is over.
            await until(lambda: learner.polls, _LIMIT_S)
            sampler.gate = asyncio.Event()
            long = rpc.to_duration(90.0)
            learner.leases.append(lease(attempts=2, lease_ttl=long, group_deadline=long))
            await until(lambda: sampler.running == 2, _LIMIT_S)
            proxy.go_down()
            sampler.gate.set()
            await asyncio.sleep(1.0)
            assert not learner.submitted
            proxy.heal()
            await until(lambda: len(learner.submitted) == 2, _LIMIT_S)

    first, second = learner.submitted
    assert {first.key, second.key} == {(0, 0), (1, 0)}
    assert {each.header.WhichOneof("outcome") for each in learner.submitted} == {"reward"}
    tokens = np.frombuffer(first.token_ids, "<i4")
    assert tokens[-1] == sampler.orders[-1].stop_ids[0]
    logprobs = np.frombuffer(first.logprobs, "<f4")
    assert logprobs.tolist() == pytest.approx((-tokens[-3:] / 1000).tolist())
    # The burn-in is an order too; nothing was sampled twice.
    scored = [order for order in sampler.orders if order.prompt_logprobs]
    assert len(sampler.orders) - len(scored) == 1 + 2
