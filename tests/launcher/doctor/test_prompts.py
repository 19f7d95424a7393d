"""Prompts that do not fit, reported before an engine is loaded."""

import re
from pathlib import Path

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.prompts import judge_prompt
from tests.launcher.doctor import own_environment
from tests.support.doctor import check, probed, subject


@pytest.mark.parametrize(
    ("tokens", "several", "status", "detail"),
    [
        (300, True, Status.OK, "300 tokens of 400"),
        (360, True, Status.OK, "360 tokens of 400"),
        (361, True, Status.WARN, "rollout.max_generate_length = 40 there is no other"),
        (361, False, Status.OK, "361 tokens of 400"),
        (401, False, Status.FAIL, "rollout.max_input_length = 400: no turn is played"),
    ],
)
def test_a_prompt_leaves_room_for_its_turns(
    tokens: int, several: bool, status: Status, detail: str
) -> None:
    rollout = {"max_input_length": 400, "max_generate_length": 40}
    finding = judge_prompt("library", tokens, "", rollout, several=several)
    assert finding.status is status
    assert f"is {tokens} tokens" in finding.detail
    assert detail in finding.detail


async def test_the_prompt_with_its_tools_is_counted_as_the_policy_reads_it(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy)
    small = ("rollout.max_input_length=60", "rollout.max_generate_length=40")
    spec = load_spec(path, small)
    result = await probed("episodes", subject(spec, tmp_path))
    check(result, Status.FAIL, "library: its prompt with tools is", "max_input_length = 60")
    check(result, Status.FAIL, "policy.max_model_len", "library: 4 tools")
    large = ("rollout.max_input_length=8000", "policy.max_model_len=8192")
    result = await probed("episodes", subject(load_spec(path, large), tmp_path))
    check(result, Status.OK, "tokens of 8000", "library: 4 tools")


@pytest.mark.slow
async def test_tools_that_are_not_offered_are_not_counted(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy)

    async def count_tokens(*overrides: str) -> int:
        result = await probed("episodes", subject(load_spec(path, overrides), tmp_path))
        details = " ".join(finding.detail for finding in result.findings)
        counted = re.search(r"its prompt with tools is (\d+) tokens", details)
        assert counted, details
        return int(counted[1])

    every = await count_tokens()
    assert await count_tokens('learner.select.tools.library=["lend"]') < every
