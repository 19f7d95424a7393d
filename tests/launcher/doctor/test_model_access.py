"""A hub model before a run: its commit, whether it may be read, and whether it
fits."""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.model_access import resolve_commit
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.run_spec import parse_spec
from tests.support.doctor import check, probed, spec, subject
from tests.support.model_hub import FIRST, SECOND, ModelHub, model_hub


@pytest.fixture
def hub() -> Generator[ModelHub]:
    files = {"config.json": b"{}", "model.safetensors": b"w" * 2**20}
    with model_hub(ModelHub({FIRST: files, SECOND: files})) as served:
        yield served


def about(hub: ModelHub, tasks: Path, folder: Path, *overrides: str) -> RunContext:
    content = spec(Path("org/model"), tasks, *overrides)
    environ = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder)}
    return subject(content, folder, **environ)


async def test_the_commit_and_the_size_of_a_model_are_shown(
    hub: ModelHub, tasks: Path, tmp_path: Path
) -> None:
    reported = await probed("model", about(hub, tasks, tmp_path))
    check(
        reported, Status.OK, f"at commit {FIRST[:12]} (today's main, which a run keeps)", "1.0 MiB"
    )


async def test_a_gated_model_is_refused_before_anything_is_rented(
    hub: ModelHub, tasks: Path, tmp_path: Path
) -> None:
    hub.gated = True
    reported = await probed("model", about(hub, tasks, tmp_path, "launcher.backend=sky"))
    page = f"{hub.endpoint}/org/model"
    check(reported, Status.FAIL, f"is gated, and HF_TOKEN is not set: accept its licence on {page}")


async def test_a_model_that_does_not_fit_is_named_with_both_sizes(
    hub: ModelHub, tasks: Path, tmp_path: Path
) -> None:
    hub.reported_sizes["model.safetensors"] = 2**60
    here = await probed("model", about(hub, tasks, tmp_path))
    check(here, Status.FAIL, "takes 1073741824.0 GiB more in", "GiB are free there", "HF_HOME")
    there = await probed("model", about(hub, tasks, tmp_path, "launcher.backend=sky"))
    check(
        there,
        Status.FAIL,
        "more than the disk of any machine (238.4 GiB)",
        "set disk_size in launcher.sky.learner",
    )


async def test_a_branch_is_resolved_and_what_cannot_move_is_left(
    hub: ModelHub, tasks: Path, tmp_path: Path, policy: Path
) -> None:
    async def resolved(model: str, *overrides: str) -> str | None:
        plan = parse_spec(canonical_json(spec(Path(model), tasks, *overrides)))
        return await resolve_commit(plan, context.environ)

    context = about(hub, tasks, tmp_path)
    hub.branches["next"] = SECOND
    assert await resolved("org/model") == FIRST
    assert await resolved("org/model", "policy.revision=next") == SECOND
    requested = len(hub.requests)
    assert await resolved("org/model", f'policy.revision="{SECOND}"') is None
    assert await resolved(str(policy)) is None
    assert await resolved("org/model", "launcher.modules.learner=other") is None
    assert len(hub.requests) == requested
    assert await resolved("org/other", "launcher.backend=sky") is None
    with pytest.raises(ConfigError, match=r"policy\.model: org/other .* set HF_TOKEN"):
        await resolved("org/other")


PICTURED = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}


async def test_a_model_whose_text_cannot_be_trained_is_refused_by_its_config_alone(
    hub: ModelHub, tasks: Path, tmp_path: Path
) -> None:
    settings = json.dumps({**PICTURED, "text_config": {}, "vision_config": {"depth": 2}}).encode()
    hub.commits[FIRST] = {**hub.commits[FIRST], "config.json": settings}
    reported = await probed("model", about(hub, tasks, tmp_path / "hub"))
    check(reported, Status.FAIL, "KimiK25ForConditionalGeneration (model_type 'kimi_k25')")
    assert len(reported.detail) < 500
    assert not [each for each in hub.requests if each.startswith("GET") and "safetensors" in each]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(settings)
    local = await probed("model", subject(spec(folder, tasks), tmp_path))
    assert (local.status, local.detail) == (Status.FAIL, reported.detail)
