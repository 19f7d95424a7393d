"""Episodes at a gateway: whose fault it is that one does not open."""

import json
from typing import Any

import pytest

from flotilla_env_gateway.ports import BackendError
from flotilla_launcher.cli.adapters.gateway_player import GatewayPlayer
from flotilla_reading.play.ports import PlayError
from tests.contract.test_episode_service import serving
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import task_json


@pytest.mark.parametrize(
    ("kind", "changes", "is_tasks"),
    [
        ("bad_task", {}, True),
        ("auth", {}, False),
        ("", {"offered_tools": ["teleport"]}, True),
        ("", {"prompt": None}, True),
    ],
)
async def test_a_refusal_of_what_the_task_says_is_the_tasks_fault(
    kind: str, changes: dict[str, Any], *, is_tasks: bool
) -> None:
    backend = ScriptedBackend()
    if kind:
        backend.fail_at("provision", BackendError(kind, "no", delivered=False, invalid=True))
    async with serving(backend) as client:
        player = GatewayPlayer(client.stub, {}, "test")
        with pytest.raises(PlayError, match="cannot be opened: ") as caught:
            async with player.open_episode(json.loads(task_json(**changes))):
                pass
    assert caught.value.task_fault is is_tasks


async def test_what_is_too_long_for_a_message_is_the_models_and_the_attempt_is_graded() -> None:
    async with serving(ScriptedBackend()) as client:
        player = GatewayPlayer(client.stub, {}, "test")
        async with player.open_episode(json.loads(task_json())) as episode:
            name = episode.opening.tools[0].name
            refused = await episode.call_tool(name, json.dumps({"text": "ü" * 2**20}))
            assert (refused.outcome, "more than 1048576" in refused.text) == ("bad_arguments", True)
            assert (await episode.call_tool("x" * 2**21, "{}")).outcome == "bad_arguments"
            assert (await episode.call_tool("none", "{}")).outcome == "bad_tool"
            graded = await episode.grade("ü" * 2**20, [])
    assert graded.reward == 1.0, graded
