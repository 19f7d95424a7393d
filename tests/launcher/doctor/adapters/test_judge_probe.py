"""The doctor of a run whose groups are judged, at endpoints that speak real HTTP."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.rpc.free_ports import free_address
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.run_context import RunContext
from tests.support.doctor import Handle, check, double, probed, spec, subject

KEY = "judge-key-for-tests-0123"
GOOD = '{"scores": {"A1": 1, "A2": 0}}'


def about(policy: Path, tasks: Path, folder: Path, url: str, **environ: str) -> RunContext:
    """A run with the judge of this URL."""
    table = (f"url={url}/v1", "model=judge-70b", "max_calls=10", "api_key=$JUDGE_KEY")
    content = spec(policy, tasks, *(f"learner.judge.{each}" for each in table))
    return subject(content, folder, **environ)


def says(text: Any, *, status: int = 200) -> Handle:
    """An endpoint that takes the key and answers so."""

    def answer(path: str, headers: Mapping[str, str], _: Mapping[str, Any]) -> tuple[int, Any]:
        assert path == "/v1/chat/completions"
        if headers.get("authorization") != f"Bearer {KEY}":
            return 401, {"error": "no such key"}
        return status, {"choices": [{"message": {"content": text}}]}

    return answer


async def test_a_judge_that_answers_is_good_and_one_without_a_table_does_not_apply(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(says(json.dumps(json.loads(GOOD)))) as url:
        result = await probed("judge", about(policy, tasks, tmp_path, url, JUDGE_KEY=KEY))
        check(result, Status.OK, f"judge-70b at {url}/v1 answers")
    check(await probed("judge", subject(spec(policy, tasks), tmp_path)), Status.SKIPPED)


async def test_a_judge_that_chats_is_a_warning(policy: Path, tasks: Path, tmp_path: Path) -> None:
    with double(says(f"Sure! {GOOD}")) as url:
        result = await probed("judge", about(policy, tasks, tmp_path, url, JUDGE_KEY=KEY))
    check(result, Status.WARN, "wrote 'Sure!", "choose another model")


async def test_an_endpoint_that_is_busy_is_a_warning(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(says("", status=503)) as url:
        result = await probed("judge", about(policy, tasks, tmp_path, url, JUDGE_KEY=KEY))
    check(result, Status.WARN, "answered 503", "a run waits for it")


async def test_a_wrong_key_no_key_and_an_endpoint_of_something_else_are_faults(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    with double(says(GOOD)) as url:
        result = await probed("judge", about(policy, tasks, tmp_path, url, JUDGE_KEY="other-key"))
        check(result, Status.FAIL, "answered 401", "correct learner.judge")
        assert "other-key" not in result.detail
        none = await probed("judge", about(policy, tasks, tmp_path, url))
        check(none, Status.FAIL, "which learner.judge.api_key names", "export JUDGE_KEY")
    with double(lambda *_: (200, {"hello": "world"})) as url:
        result = await probed("judge", about(policy, tasks, tmp_path, url, JUDGE_KEY=KEY))
        check(result, Status.FAIL, "gives no chat completion")


async def test_a_judge_that_is_not_there_is_a_fault(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    away = about(policy, tasks, tmp_path, f"http://{free_address()}", JUDGE_KEY=KEY)
    check(await probed("judge", away), Status.FAIL, "cannot be reached", "start the server")
