"""Fleet's own SDK, unmodified, against the emulator; synchronous and asynchronous alike."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flotilla_environments.tasks import make_task
from tests.environments.fleet_emulator_process import ERRORS, emulating, sdk, settled, solve


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulating("--instance-limit", "20") as address:
        yield address


@pytest.fixture(params=[sdk.Fleet, sdk.AsyncFleet], ids=["sync", "async"])
async def fleet(
    request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """A client that knows the emulator by its two variables alone; retries nothing."""
    monkeypatch.setenv("FLEET_BASE_URL", url)
    monkeypatch.setenv("FLEET_API_KEY", "sk-test")
    client = request.param(max_retries=0)
    yield client
    await settled(client.close_all(profile_id="self"))
    connection = client.client.httpx_client
    await settled(connection.close() if request.param is sdk.Fleet else connection.aclose())


async def make(fleet: Any, task: Any, **options: Any) -> Any:
    requests = {"data_key": task.data_key, "env_variables": task.env_variables, "run_id": "run"}
    return await settled(fleet.make(task.env_key, **requests | options))


async def first_task(fleet: Any) -> Any:
    return (await settled(fleet.load_tasks(keys=["booking-train-000000"])))[0]


async def verified(task: Any, env: Any, **arguments: Any) -> Any:
    return await settled(
        task.verify_detailed(env, **arguments)
        if isinstance(env, sdk.client.SyncEnv)
        else task.verify_detailed_async(env, **arguments)
    )


async def test_the_catalogue_is_listed(fleet: Any) -> None:
    environments = await settled(fleet.list_envs())
    assert "booking" in [environment.env_key for environment in environments]
    environment = await settled(fleet.environment("shop"))
    assert (environment.default_version, list(environment.versions)) == ("v1", ["v1"])
    assert await settled(fleet.list_regions()) == ["us-west-1", "us-east-1", "eu-west-2"]
    account = await settled(fleet.account())
    assert (account.instance_limit, account.instance_count) == (20, 0)


async def test_tasks_are_loaded_filtered_updated_and_imported(fleet: Any) -> None:
    task = await first_task(fleet)
    made = make_task("booking", "train", 0)
    assert (task.env_key, task.data_key) == ("booking:v1", "train-000000:v1")
    assert (task.prompt, task.verifier_func) == (made["prompt"], made["verifier_func"])
    shop = await settled(fleet.load_tasks(env_key="shop"))
    assert len(shop) == 33
    assert {entry.env_id for entry in shop} == {"shop"}
    assert len(await settled(fleet.load_tasks(data_id="train-000003"))) == 3
    copy = task.model_copy(update={"key": "copy", "prompt": "before"})
    assert (await settled(fleet.import_single_task(copy))).status_code == 200
    await settled(fleet.update_task("copy", prompt="after", metadata={"seed": 1}))
    read = await settled(fleet.get_task("copy"))
    assert (read.prompt, read.metadata) == ("after", {"seed": 1})
    assert read.verifier.code == made["verifier_func"]


async def test_an_instance_has_what_it_was_made_with(fleet: Any) -> None:
    task = await first_task(fleet)
    env = await make(fleet, task, heartbeat_interval=60, ttl_seconds=120, region="us-east-1")
    assert (env.status, env.region, env.health) == ("running", "us-east-1", True)
    assert (env.data_key, env.data_version, env.version) == ("train-000000", "v1", "v1")
    assert env.env_variables == make_task("booking", "train", 0)["env_variables"]
    beat = await settled(env.heartbeat())
    assert (beat.success, beat.interval_seconds) == (True, 60)
    again = await settled(fleet.heartbeat(env.instance_id))
    assert again.deadline_timestamp >= beat.deadline_timestamp
    found = await settled(fleet.instance(env.instance_id))
    assert found.urls == env.urls
    assert env.mcp.url == f"{env.urls.root}mcp"


async def test_the_runner_shows_health_and_databases(fleet: Any) -> None:
    env = await make(fleet, await first_task(fleet))
    health = await settled(env.instance.manager_health_check())
    assert (health.status, health.service) == ("healthy", "booking")
    resources = await settled(env.resources())
    named = [(entry.resource.name, entry.resource.mode.value) for entry in resources]
    assert named == [("seed", "ro"), ("current", "rw")]
    described = await settled(env.db("current").describe())
    assert {table.name for table in described.tables} == {"hotels", "bookings", "task_facts"}
    rows = await settled(env.db("seed").query("select count(*) from bookings where id > ?", [0]))
    assert rows.rows[0][0] > 0
    written = await settled(env.db("current").exec("delete from bookings"))
    assert (written.success, written.rows_affected) == (True, rows.rows[0][0])
    assert await settled(env.db("current").table("bookings").count()) == 0
    refused = await settled(env.db("current").query("select * from elsewhere"))
    assert (refused.success, refused.error) == (False, "no such table: elsewhere")


async def test_a_reset_brings_the_seed_back(fleet: Any) -> None:
    env = await make(fleet, await first_task(fleet))
    await settled(env.instance.load())
    await settled(env.db("current").exec("delete from bookings"))
    assert (await settled(env.reset())).success is True
    difference = await settled(env.db("seed").diff(env.db("current")))
    await settled(difference.expect_only_v2([]))


async def test_a_diff_is_made_by_the_instance(fleet: Any) -> None:
    env = await make(fleet, await first_task(fleet))
    await settled(env.instance.load())
    hotels = (await settled(env.db("seed").query("select id from hotels"))).rows
    changed = hotels[0][0]
    await settled(
        env.db("current").exec("update hotels set price = 1, name = 'X' where id = ?", [changed])
    )
    ignored = sdk.verifiers.db.IgnoreConfig(fields={"name"})
    difference = await settled(env.db("seed").diff(env.db("current"), ignored))
    field = {"table": "hotels", "pk": changed, "type": "modify"}
    field |= {"resulting_fields": [("price", 1)], "no_other_changes": True}
    await settled(difference.expect_exactly([field]))
    with pytest.raises(AssertionError):
        await settled(difference.expect_only_v2([]))
    assert (await settled(env.fs().diff())).total_files == 0


async def test_a_verifier_grades_with_its_stdout_and_is_cached(fleet: Any) -> None:
    loaded = await first_task(fleet)
    # What no bundle on the server has.
    code = f"{loaded.verifier_func}\n# {uuid.uuid4()}\nprint('read')\n"
    task = loaded.model_copy(update={"verifier_func": code, "verifier": None})
    env = await make(fleet, task)
    before = await verified(task, env, final_answer="done")
    assert (before.success, before.result, before.bundle_cache_hit) == (True, 0, False)
    assert before.stdout.startswith("read\n>>> ERROR_ACCUMULATOR >>>\n['[X] ")
    assert "was not cancelled" in before.stdout
    solve(env.urls.root, "booking", "train-000000", ("mcp", "api/v1/mcp"))
    after = await verified(task, env, final_answer="done")
    assert (after.success, after.result, after.bundle_cache_hit) == (True, 1, True)
    assert after.execution_id != before.execution_id
    verify = task.verify if isinstance(env, sdk.client.SyncEnv) else task.verify_async
    assert await settled(verify(env, final_answer="done")) == 1.0


async def test_a_function_is_executed_by_the_instance(fleet: Any) -> None:
    env = await make(fleet, await first_task(fleet))
    code = "def check(env):\n    return env.db('seed').table('hotels').count()\n"
    assert (await settled(env.verify_raw(code, "check"))).result == 6
    wrong = await settled(env.verify_raw(code, "other"))
    assert (wrong.success, wrong.error[:9]) == (False, "NameError")


async def test_runs_group_instances_and_are_closed_together(fleet: Any) -> None:
    task = await first_task(fleet)
    mine = {(await make(fleet, task)).instance_id for _ in range(2)}
    other = await make(fleet, task, run_id="other")
    listed = await settled(fleet.instances(run_id="run", status="running", region="us-west-1"))
    assert {env.instance_id for env in listed} == mine
    runs = {run.run_id: run for run in await settled(fleet.list_runs())}
    assert (runs["run"].running_count, runs["other"].running_count) == (2, 1)
    closed = await settled(fleet.close_all(run_id="run"))
    assert {env.instance_id for env in closed} == mine
    assert [run.run_id for run in await settled(fleet.list_runs())] == ["other"]
    everything = await settled(fleet.list_runs(status="all"))
    assert {"run", "other"} <= {run.run_id for run in everything}
    assert (await settled(other.close())).status == "stopped"


async def test_a_session_is_logged_and_completed(fleet: Any) -> None:
    job_id = await settled(fleet.trace_job(name="eval"))
    session = fleet.start_session(job_id=job_id, model="tiny", task_key="t")
    history = [{"role": "user", "content": "hello"}]
    first = await settled(session.log(history, {"role": "assistant", "content": "hi"}))
    assert (first.created_new_session, first.message_count) == (True, 2)
    await settled(session.complete(verifier_execution_id="e"))
    assert session.message_count == 2
    created = await settled(fleet.create_session(model="tiny", task_key="t"))
    message = {"role": "assistant", "content": "done"}
    await settled(fleet.append_message(created.session_id, message))
    done = await settled(fleet.complete_session(created.session_id))
    assert (done.message_count, done.created_new_session) == (3, False)
    transcript = await settled(fleet.get_session_transcript(created.session_id))
    assert [entry.content for entry in transcript.transcript][1] == "done"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"env_key": "bank"}, "FleetEnvironmentNotFoundError", "Environment 'bank' not found"),
        ({"env_key": "shop:v9"}, "FleetVersionNotFoundError", "Version 'v9' not found for 'shop'"),
        ({"env_key": "shop", "region": "moon"}, "FleetRegionError", "Region moon not supported"),
        ({"env_key": "shop", "data_key": "x"}, "FleetBadRequestError", "such as train-000123"),
        ({"env_key": "shop", "heartbeat_interval": 1}, "FleetAPIError", "greater than or equal"),
    ],
)
async def test_a_refused_instance_raises_the_sdks_own_error(
    fleet: Any, arguments: dict[str, Any], error: str, message: str
) -> None:
    with pytest.raises(ERRORS) as raised:
        await settled(fleet.make(**arguments))
    assert type(raised.value).__name__ == error
    assert message in str(raised.value)


async def test_the_instance_limit_is_reported_with_its_numbers(fleet: Any) -> None:
    for _ in range(20):
        await settled(fleet.make("shop"))
    with pytest.raises(ERRORS) as raised:
        await settled(fleet.make("shop"))
    refused: Any = raised.value
    assert type(refused).__name__ == "FleetInstanceLimitError"
    assert (refused.running_instances, refused.instance_limit) == (20, 20)


async def test_what_is_gone_or_unknown_raises(fleet: Any) -> None:
    env = await make(fleet, await first_task(fleet))
    await settled(env.close())
    assert (await settled(fleet.instance(env.instance_id))).status == "stopped"
    for wrong in (env.heartbeat, lambda: fleet.close("nothing"), lambda: fleet.get_task("nothing")):
        with pytest.raises(ERRORS, match="not"):
            await settled(wrong())
    with pytest.raises(Exception, match="502"):
        await settled(env.instance.load())


async def test_a_verifier_of_a_gone_instance_has_no_grade(fleet: Any) -> None:
    task = await first_task(fleet)
    env = await make(fleet, task)
    await settled(env.close())
    response = await verified(task, env)
    assert (response.success, response.result) == (False, None)
    assert "is not running" in response.error["message"]
