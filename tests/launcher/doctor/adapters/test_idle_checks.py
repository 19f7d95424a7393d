"""Environments in which a task passes untouched, or whose episodes are not alike, refuse a run."""

import json
from pathlib import Path

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_env_gateway.adapters.replay.recorder import Recording
from flotilla_environments.api import ENV_KEYS
from flotilla_environments.tasks import make_task
from flotilla_launcher.doctor.findings import ProbeResult, Status
from tests.launcher.doctor import own_environment
from tests.support.doctor import check, probed, spec, subject

pytestmark = pytest.mark.usefixtures("uncounted")

# A library that keeps its loans in one file for all episodes. It starts fast, without packages.
KEEPING = """
import json, pathlib, sys, time

kept = pathlib.Path(__file__).with_name("loans.json")
loans = json.loads(kept.read_text()) if kept.exists() else []
answers = {"list_loans": lambda: json.dumps(loans)}

def answer(method, params):
    if method == "initialize":
        info = {"name": "library", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        hints = {"readOnlyHint": True}
        schema = {"type": "object"}
        names = sorted(answers)
        return {"tools": [dict(name=n, inputSchema=schema, annotations=hints) for n in names]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": answers[params["name"]]()}]}
    return {}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = answer(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
# It notes each start there, as other servers make a folder or a first row.
NOTING = KEEPING.replace(
    "\nanswers", '\nkept.write_text(json.dumps([*loans, "Walden"]))\nanswers', 1
)
TIMED = KEEPING.replace("{", '{"read_clock": lambda: str(time.monotonic_ns()), ', 1)


async def examined(path: Path, *overrides: str) -> ProbeResult:
    return await probed("episodes", subject(load_spec(path, overrides), path.parent))


async def test_the_environments_of_this_repository_pass(policy: Path, tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    tasks = [make_task(env_key, "train", n) for env_key in ENV_KEYS for n in range(5)]
    path.write_text(json.dumps(tasks))
    result = await probed("episodes", subject(spec(policy, path), tmp_path))
    check(result, Status.OK, *(f"{env_key}: " for env_key in ENV_KEYS))
    assert result.detail.count("doing nothing earns 0") == len(ENV_KEYS), result.detail


async def test_a_task_that_passes_untouched_is_named(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy, server=KEEPING)
    (tmp_path / "loans.json").write_text('["Emma"]')
    what = "library: 'lend-0' (3 of 3 tasks tried) passes though nothing was done"
    check(await examined(path), Status.FAIL, what, "what earlier episodes wrote")


async def test_a_task_may_say_that_doing_nothing_is_right(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy, server=KEEPING)
    (tmp_path / "loans.json").write_text('["Emma"]')
    tasks = json.loads((tmp_path / "tasks.json").read_text())["tasks"]
    said = [{**task, "passes_untouched": task["key"] != "lend-1"} for task in tasks]
    (tmp_path / "tasks.json").write_text(json.dumps(said))
    check(await examined(path), Status.FAIL, "'lend-1' (1 of 3 tasks tried)", "passes_untouched")
    (tmp_path / "tasks.json").write_text(json.dumps([said[0], said[2]]))
    check(await examined(path), Status.OK, "doing nothing earns 1")


async def test_a_second_episode_that_sees_the_first_is_an_error(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy, server=NOTING)
    differs = "library: a second episode of 'lend-0' differs"
    seen = """list_loans answered '[]', then '["Walden"]'"""
    check(await examined(path), Status.FAIL, f"{differs}: {seen}", "outside the episode's folder")


async def test_episodes_that_are_meant_to_share_a_world_are_warned_of(
    policy: Path, tmp_path: Path
) -> None:
    path = own_environment.write(tmp_path, policy, server=NOTING)
    (tmp_path / "loans.json").write_text('["Emma"]')
    result = await examined(path, "env_gateway.servers.0.shared_state=true")
    check(result, Status.WARN, "a second episode of 'lend-0' differs", "(1 of 3 tasks tried)")


async def test_a_tool_that_reads_a_clock_is_not_compared(policy: Path, tmp_path: Path) -> None:
    path = own_environment.write(tmp_path, policy, server=TIMED)
    check(await examined(path), Status.OK, "library: 2 tools (list_loans, read_clock)")


async def test_a_further_task_that_cannot_be_played_is_a_warning(
    policy: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.json"
    first, second = (make_task("booking", "train", n) for n in range(2))
    path.write_text(json.dumps([first, {**second, "data_id": "nowhere"}]))
    result = await probed("episodes", subject(spec(policy, path), tmp_path))
    check(result, Status.WARN, f"task {second['key']!r}: booking cannot be opened")
    check(result, Status.WARN, "ok: booking: 4 tools")


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_recorded_run_is_found_and_not_played_ahead(
    recorded: bool, policy: Path, tmp_path: Path
) -> None:
    path, run = tmp_path / "tasks.json", tmp_path / "run"
    path.write_text(json.dumps([make_task("booking", "train", 0)]))
    if recorded:
        Recording(run, max_bytes=2**20)
    section = {"backend": "replay", "backends": {"replay": {"run": str(run)}}}
    result = await probed(
        "episodes", subject({**spec(policy, path), "env_gateway": section}, tmp_path)
    )
    if recorded:
        assert result.status is Status.OK, result
        assert "booking: a recorded run is replayed" in str(result)
    else:
        assert result.status is Status.FAIL
        assert "env_gateway.backends.replay.run" in str(result)
