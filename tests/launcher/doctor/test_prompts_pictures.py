"""Prompts that show pictures: the doctor counts what a rollout sends."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc import rpc
from flotilla_common.spec.spec import SharedConfig
from flotilla_environments.tasks import make_task, make_tasks
from flotilla_launcher.doctor.adapters.gateway_process import serve_gateway
from flotilla_launcher.doctor.findings import ProbeResult, Status
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.adapters.model_files import read_model_folder
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.episodes.conversation import MessageReader
from flotilla_rollout.episodes.prompt_cache import Prompt, PromptCache
from flotilla_rollout.types import OpenRequest
from tests.support.doctor import check, probed, spec, subject

# Its screen is noise, of which a PNG is too large to come with the answer.
SERVER = """
import io, random, sys
from typing import Literal
from mcp.server.mcpserver import Image, MCPServer
from PIL import Image as Picture

server = MCPServer("noisy", log_level="WARNING")

@server.tool(structured_output=False)
def computer(action: Literal["screenshot", "left_click"], coordinate: list[int] | None = None):
    '''A screen of 320x200 pixels.'''
    written = io.BytesIO()
    Picture.frombytes("RGB", (320, 200), random.Random(0).randbytes(192000)).save(written, "PNG")
    return [Image(data=written.getvalue(), format="png")]

server.run("stdio")
"""
VERIFIER = "def never(env, final_answer=None):\n    return 0\n"


def screen_run(model: Path, folder: Path, tasks: list[Any]) -> dict[str, Any]:
    path = folder / "tasks.json"
    path.write_text(json.dumps(tasks))
    content = spec(model, path, "policy.vision.max_images=4", "rollout.dialect.name=full")
    serve = {"command": ["python", "-P", "-m", "flotilla_environments.serve"], "instances": True}
    content["env_gateway"] = {"backend": "mcp", "servers": [serve]}
    return content


def first_task(content: dict[str, Any]) -> str:
    return json.dumps(json.loads(Path(content["learner"]["tasks"]).read_text())[0])


def noisy_run(model: Path, folder: Path) -> dict[str, Any]:
    server = folder / "server.py"
    server.write_text(SERVER)
    task = make_task("screen", "train", 0) | {"verifier_func": VERIFIER}
    content = screen_run(model, folder, [{**task, "data_id": "", "data_version": ""}])
    served = {"transport": "stdio", "command": ["python", str(server)]}
    content["env_gateway"] |= {"servers": [served], "verifiers": {"unsafe_local_verifiers": True}}
    return content


async def make_prompt(content: dict[str, Any], folder: Path) -> Prompt:
    """Return the prompt of the run's first task, as a rollout makes it at a gateway."""
    shared = SharedConfig.model_validate({key: content[key] for key in ("name", "policy")})
    path = folder / "spec.json"
    path.write_text(json.dumps(content))
    dialect = DialectConfig(**content["rollout"]["dialect"])
    model = read_model_folder(Path(shared.policy.model), shared.policy, dialect)
    reader = MessageReader(model.tokenizer, model.dialect)
    prompts = PromptCache(model.dialect, reader, model.vision)
    async with (
        serve_gateway(path, (), print) as (address, token),
        rpc.channel(address, token=token) as channel,
    ):
        environment = GatewayEnvironment(
            channel, run_id="r", worker_id="w", renew_interval_s=9.0, family=model.vision
        )
        request = OpenRequest(AttemptKey("g", 0, 0), first_task(content), 1, 300.0)
        async with environment.open_episode(request) as episode:
            prompt = await prompts.get_prompt(episode.info)
        await environment.wait_until_closed()
    return prompt


def counted(result: ProbeResult) -> int:
    found = re.search(r"its prompt with tools is (\d+) tokens", result.detail)
    assert found, result.detail
    return int(found[1])


@pytest.mark.parametrize(("make", "pixels"), [("screen", 128 * 128), ("noisy", 320 * 192)])
async def test_the_first_screen_counts_as_a_rollout_sends_it(
    make: str, pixels: int, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = vision_folder("qwen3_vl")
    tasks = [dict(task) for task in make_tasks(("screen",), "train", 1)]
    content = noisy_run(model, tmp_path) if make == "noisy" else screen_run(model, tmp_path, tasks)
    prompt = await make_prompt(content, tmp_path)
    [place] = prompt.places
    assert place.grid[1] * place.grid[2] * 16 * 16 == pixels
    result = await probed("episodes", subject(content, tmp_path))
    assert counted(result) == len(prompt.token_ids)
    assert len(prompt.token_ids) > pixels // 32**2


async def test_the_screen_is_counted_where_tasks_without_one_come_first(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = vision_folder("qwen3_vl")
    tasks = [dict(task) for task in make_tasks(("screen",), "train", 2)]
    tasks[0]["task_modality"] = "joint"
    content = screen_run(model, tmp_path, tasks)
    mixed = await probed("episodes", subject(content, tmp_path))
    (tmp_path / "tasks.json").write_text(json.dumps(tasks[1:]))
    alone = await probed("episodes", subject(content, tmp_path / "alone"))
    assert counted(mixed) == counted(alone)


async def test_a_prompt_with_more_pictures_than_a_conversation_may_have_is_refused(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    content = noisy_run(vision_folder("qwen3_vl"), tmp_path)
    server = tmp_path / "server.py"
    server.write_text(server.read_text().replace("return [Image(", "return 5 * [Image("))
    result = await probed("episodes", subject(content, tmp_path))
    check(result, Status.FAIL, "its prompt has 5 pictures", "policy.vision.max_images = 4")
