"""A chat template that no dialect can play is reported before an engine is loaded."""

import json
import shutil
from pathlib import Path

import pytest

from flotilla_launcher.doctor.findings import Status
from tests.rollout.dialects.templates import chatml
from tests.support.doctor import check, probed, spec, subject
from tests.support.model_hub import FIRST, ModelHub, model_hub

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.slow
async def test_a_template_that_cannot_be_played_is_named_with_what_plays_it(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    (folder / "chat_template.jinja").write_text(chatml(""))
    # The search asks vLLM's parsers, too.
    result = await probed("dialect", subject(spec(folder, tasks), tmp_path), torch=True)
    check(result, Status.FAIL, "policy.model: a call that the chat template writes", "no call is")
    check(result, Status.FAIL, "native calls", '[rollout.dialect]\nname = "full"', "docs/models.md")


@pytest.mark.slow
async def test_a_template_that_holds_is_listed(policy: Path, tasks: Path, tmp_path: Path) -> None:
    check(await probed("dialect", subject(spec(policy, tasks), tmp_path)), Status.OK, "is read as")


@pytest.mark.slow
async def test_a_model_of_the_hub_is_rehearsed_without_its_weights(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    files = {name: (policy / name).read_bytes() for name in FILES}
    ends = json.dumps({"eos_token_id": 10**6}).encode()
    files |= {"generation_config.json": ends, "model.safetensors": b"w" * 1000}
    with model_hub(ModelHub({FIRST: files})) as hub:
        environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache")}
        content = spec(Path("org/model"), tasks)
        about = subject(content, tmp_path, HF_HUB_OFFLINE="0", **environ)
        result = await probed("dialect", about)
        assert not [requested for requested in hub.requests if "safetensors" in requested]
    check(result, Status.FAIL, "turns end by token 1000000", "generation_config.json")
