"""Pictures of a public MCP server, as the rollout's own loop shows them to a policy that sees."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture import PlacedPicture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.placeholders import check_places
from flotilla_common.rpc import rpc
from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_env_gateway.ports import Media
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.adapters.model_files import ModelFiles, read_model_folder
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.episodes.episode import Attempt, AttemptRunner
from flotilla_rollout.types import Sampling
from tests.mcp_servers.playing import Part, connected, play_alone
from tests.mcp_servers.public_servers import SERVERS
from tests.mcp_servers.public_tasks import Play
from tests.mcp_servers.test_public_servers import write_section
from tests.support.gateway_process import TOKEN, serving_process
from tests.support.rollout import POLICY, limits, turns

pytestmark = pytest.mark.mcp_servers

LOOK = "get-tiny-image"
VERIFIER = """
def verify(env, final_answer=None):
    return int(final_answer == "seen")
"""
TASK = {
    "key": "look",
    "env_id": "public",
    "prompt": "Look at the picture.",
    "offered_tools": [LOOK],
    "verifier_func": VERIFIER,
}


def read_model(folder: Path) -> ModelFiles:
    vision = VisionConfig(max_images=4)
    policy = PolicyConfig(model=str(folder), dtype="float32", max_model_len=8192, vision=vision)
    return read_model_folder(folder, policy, DialectConfig(name="full"))


async def play_seeing(address: str, model: ModelFiles) -> Trajectory:
    """Play an attempt that looks once, and is done."""
    call = f'<tool_call>{{"name": "{LOOK}", "arguments": {{}}}}</tool_call>'
    script = turns(call, "seen <done>")
    engine = FakeEngine(model.tokenizer, model.dialect.stop_ids[0], script, policy=POLICY)
    bounds = limits(
        max_input_length=7000,
        max_model_len=8192,
        max_images=4,
        attempt_timeout_s=60.0,
        grade_timeout_s=30.0,
    )
    async with rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(
            channel, run_id="run", worker_id="w", renew_interval_s=9.0, family=model.vision
        )
        runner = AttemptRunner(
            engine, environment, model.tokenizer, model.dialect, bounds, family=model.vision
        )
        key = AttemptKey("look", 0, 0)
        attempt = Attempt(key, json.dumps(TASK), Sampling(1.0, 7), 1, 120.0)
        trajectory = await runner.run_attempt(attempt)
        await environment.wait_until_closed()
    assert not trajectory.detail, trajectory.detail
    return trajectory


async def test_a_picture_of_a_public_server_is_in_the_tokens_of_a_policy_that_sees(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, server = read_model(vision_folder("qwen3_vl")), SERVERS["everything"]
    section = write_section(server, uuid.uuid4().hex, tmp_path / "template")
    async with serving_process(tmp_path, section) as (_, address):
        with connected(address) as connection:
            look = Part(server.tasks[0], Play([(LOOK, {})]))
            answered = await play_alone(connection, look)
        trajectory = await play_seeing(address, model)
    [raw] = [part for part in answered.answers[0].parts if isinstance(part, Media)]
    expected, family = read_picture(raw.data), model.vision
    assert family is not None
    assert (expected.width, expected.height) == (raw.width, raw.height)
    assert trajectory.reward == 1.0
    assert trajectory.pictures == {expected.sha256: expected.data}
    [sequence] = trajectory.sequences
    [item] = sequence.pictures
    grid = family.grid(expected.width, expected.height)
    assert (item.sha256, item.mime, item.grid) == (expected.sha256, expected.mime, grid)
    assert item.processor_digest == family.processor_digest
    place = PlacedPicture(item.sha256, grid, item.token_offset)
    check_places(sequence.token_ids, [place], family)
    begin, end = place.offset - 1, place.offset + family.count(grid)
    ids = sequence.token_ids.tolist()
    assert (ids[begin], ids[end]) == (family.vision_start, family.vision_end)
    ends = np.cumsum([span.length for span in sequence.spans])
    author = sequence.spans[int(np.searchsorted(ends, place.offset, "right"))].author
    assert author is Author.ENVIRONMENT
