"""Refusals of the gateway, through the rollout's client, in the learner's words."""

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.domain.attempts import AttemptKey, FailureKind
from flotilla_common.domain.attempts import AttemptKey as RolloutKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc import rpc
from flotilla_env_gateway.api.episode_service import EpisodeService
from flotilla_learner.sampling.refused_tasks import Refusal, common_refusal
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.ports import EnvironmentLost
from flotilla_rollout.types import OpenRequest
from tests.contract.test_episode_service import TOKEN
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import running, task_json


async def opened(task: str) -> str:
    """Return the reason why an episode could not be opened, as a failed attempt carries it."""
    async with running(ScriptedBackend()) as gateway:
        server = rpc.server(token=TOKEN)
        service = EpisodeService(gateway, lambda: None)
        episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
        async with (
            rpc.serving(server, "127.0.0.1:0", grace_s=0.1) as at,
            rpc.channel(at.address, token=TOKEN) as channel,
        ):
            environment = GatewayEnvironment(
                channel, run_id="run", worker_id="w", renew_interval_s=1.0
            )
            with pytest.raises(EnvironmentLost) as caught:
                async with environment.open_episode(
                    OpenRequest(RolloutKey("g", 0, 0), task, 1, 5.0)
                ):
                    raise AssertionError("it was opened")
            return str(caught.value)


@pytest.mark.parametrize(
    ("task", "refusal", "reported"),
    [
        (task_json(env_id="elsewhere"), Refusal.UNKNOWN_ENVIRONMENT, "no environment 'elsewhere'"),
        ('{"key": "t", "prompt": "p"}', Refusal.BAD_TASK, "env_id (or env_key) is missing"),
    ],
)
async def test_the_learner_recognises_what_the_gateway_refuses_for_good(
    task: str, refusal: Refusal, reported: str
) -> None:
    detail = await opened(task)
    key = AttemptKey("g", 0, 0)
    lost = Trajectory(key, "", (), b"", failure=FailureKind.ENV_LOST, detail=detail)
    found = common_refusal([lost])
    assert found is not None
    assert found[0] is refusal
    assert reported in found[1]
