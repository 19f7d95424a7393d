"""Instances of apps: tools, state and queries."""

import sqlite3
import time
from typing import Any

import pytest

from flotilla_environments.api import ENV_KEYS, Instance, ToolError, open_instance
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import draw_scenario

WRITES = {"book_room", "cancel_booking", "close_issue", "assign_issue", "create_order"}


def state(instance: Instance) -> bytes:
    return instance.snapshot("current")


def test_tools_have_a_schema_and_state_what_may_be_retried() -> None:
    specs = {spec.name: spec for key in ENV_KEYS for spec in open_tools(key)}
    assert {name for name, spec in specs.items() if not spec.read_only} == WRITES
    assert not specs["book_room"].idempotent
    assert not specs["create_order"].idempotent
    assert specs["close_issue"].idempotent
    assert specs["cancel_booking"].destructive
    assert specs["book_room"].parameters == {
        "type": "object",
        "properties": {
            "hotel_id": {"type": "integer", "description": "id of the hotel"},
            "guest": {"type": "string", "description": "name of the guest"},
        },
        "required": ["hotel_id", "guest"],
        "additionalProperties": False,
    }
    assert all(spec.description for spec in specs.values())


def open_tools(env_key: str) -> list[Any]:
    return open_instance(env_key, "train-000000").tools()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fly", {}, "unknown tool: fly"),
        ("close_issue", {}, "missing argument: issue_id"),
        ("close_issue", {"issue_id": 11, "why": "x"}, "unknown argument: why"),
        ("close_issue", {"issue_id": "11"}, "issue_id must be an integer"),
        ("close_issue", {"issue_id": True}, "issue_id must be an integer"),
        ("close_issue", {"issue_id": 10**30}, "issue_id must be an integer"),
        ("close_issue", {"issue_id": 5}, "not found"),
        ("find_issues", {"repo": "\ud800", "label": "x"}, "repo must be a string"),
        ("find_issues", {"repo": "x", "label": "'; drop table issues"}, "not found"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    instance = open_instance("tracker", "train-000000")
    before = state(instance)
    with pytest.raises(ToolError, match=f"^{message}$"):
        instance.call(name, arguments)
    assert state(instance) == before


def test_an_order_of_nothing_is_refused() -> None:
    of = draw_scenario("shop", "train-000000")
    instance = open_instance("shop", "train-000000")
    with pytest.raises(ToolError, match="at least 1"):
        instance.call("create_order", {**of.targets, "quantity": 0})


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_every_lookup_of_a_plan_shows_exactly_one_row(env_key: str) -> None:
    for index in range(100):
        instance = open_instance(env_key, f"train-{index:06d}")
        reads = [call for call in plan_calls(instance.scenario) if call[0] not in WRITES]
        assert all(len(instance.call(*call)) == 1 for call in reads)


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_reset_brings_the_seed_back_and_instances_do_not_share_state(env_key: str) -> None:
    instance, other = (open_instance(env_key, "train-000003") for _ in range(2))
    for call in plan_calls(instance.scenario):
        instance.call(*call)
    assert state(instance) != instance.snapshot("seed")
    assert state(other) == other.snapshot("seed")
    instance.reset()
    assert state(instance) == instance.snapshot("seed")


@pytest.mark.parametrize(
    ("env_key", "data_id", "version", "hint"),
    [
        ("bank", "train-000001", "v1", "use one of booking, tracker, shop"),
        ("shop", "train-1", "v1", "such as train-000123"),
        ("shop", "test-000001", "v1", "splits: train, heldout"),
        ("shop", "train-000001", "v2", "use 'v1'"),
    ],
)
def test_unknown_data_is_named_with_the_fix(
    env_key: str, data_id: str, version: str, hint: str
) -> None:
    with pytest.raises(ValueError, match=hint):
        open_instance(env_key, data_id, version)


@pytest.mark.parametrize(
    "sql",
    [
        "delete from issues",
        "drop table issues",
        "attach '/tmp/x.db' as x",
        "pragma query_only = off",
        "select load_extension('x')",
        "select 1; select 2",
        "select * from elsewhere",
        "with recursive r(x) as (select 1 union all select x + 1 from r) select count(*) from r",
        "select zeroblob(100000000)",
    ],
)
def test_a_query_can_neither_write_nor_leave_the_database_nor_run_for_ever(sql: str) -> None:
    instance = open_instance("tracker", "train-000000")
    before = state(instance)
    with pytest.raises(sqlite3.Error):
        instance.query("current", sql)
    assert state(instance) == before
    assert instance.query("current", "select count(*) from issues").rows == [(3,)]


def test_a_query_may_write_to_current_on_request_but_never_to_the_seed() -> None:
    instance = open_instance("tracker", "train-000000")
    changed = instance.query("current", "delete from issues", read_only=False)
    assert changed.rows_affected == 3
    with pytest.raises(sqlite3.Error):
        instance.query("seed", "delete from issues", read_only=False)
    assert instance.query("seed", "select count(*) from issues").rows == [(3,)]


def test_an_instance_costs_less_than_two_milliseconds_of_cpu() -> None:
    def cost_s() -> float:
        start = time.process_time()
        for index in range(100):
            instance = open_instance("booking", f"heldout-{index:06d}")
            instance.query("current", "select 1")
            instance.close()
        return (time.process_time() - start) / 100

    assert min(cost_s() for _ in range(3)) < 0.002
