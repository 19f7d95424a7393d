import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flotilla_environments
from flotilla_environments.api import Instance, ToolError, open_instance
from flotilla_environments.local_verifier import run_verifier
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.task_generator import ALL_APPS, Scenario, draw_scenario
from flotilla_environments.tasks import verifier_source
from tests.support.verifier_dialect import grade

ROOT = Path(flotilla_environments.__file__).parent
KINDS = [(key, kind) for key, app in ALL_APPS.items() for kind in app.kinds]
# Verifiers of the final answer alone, without an app's state.
ANSWERS = [("gsm8k", "flexible"), ("gsm8k", "strict")]


def examples(env_key: str, kind: str, count: int = 20) -> list[Instance]:
    found: list[Instance] = []
    index = 0
    while len(found) < count:
        instance = open_instance(env_key, f"train-{index:06d}")
        if instance.scenario.kind == kind:
            found.append(instance)
        index += 1
    return found


def solve(instance: Instance) -> None:
    for call in plan_calls(instance.scenario):
        instance.call(*call)


def test_the_digests_are_in_step_with_the_sources() -> None:
    listed = (ROOT / "verifiers.sha256").read_text().splitlines()
    sources = sorted(ROOT.glob("*/verifiers/*.py"))
    assert listed == [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}"
        for path in sources
    ], "run: cd environments && sha256sum */verifiers/*.py > verifiers.sha256"
    of_apps = {(path.parent.parent.name, path.stem) for path in sources} - set(ANSWERS)
    assert of_apps == set(KINDS)


@pytest.mark.parametrize(("env_key", "kind"), KINDS)
def test_a_solved_task_passes_and_an_untouched_one_fails(env_key: str, kind: str) -> None:
    source = verifier_source(env_key, kind)
    for instance in examples(env_key, kind):
        assert grade(source, instance) == 0
        solve(instance)
        assert grade(source, instance) == 1
        assert grade(source, instance, None) == 0, "the policy must also declare that it is done"


@pytest.mark.parametrize(("env_key", "kind"), KINDS)
def test_each_step_of_a_plan_is_needed(env_key: str, kind: str) -> None:
    source = verifier_source(env_key, kind)
    for instance in examples(env_key, kind, 5):
        writes = [
            call for call in plan_calls(instance.scenario) if not call[0].startswith(("f", "s"))
        ]
        for skipped in writes:
            instance.reset()
            for call in writes:
                if call != skipped:
                    instance.call(*call)
            assert grade(source, instance) == 0


def damage_booking(of: Scenario) -> list[tuple[str, dict[str, Any]]]:
    hotel, booking = of.tables["hotels"][0]["id"], of.tables["bookings"][0]["id"]
    return [
        ("book_room", {"hotel_id": hotel, "guest": of.slots["guest"]}),
        ("book_room", {"hotel_id": hotel, "guest": "Somebody"}),
        ("cancel_booking", {"booking_id": booking}),
    ]


def damage_tracker(of: Scenario) -> list[tuple[str, dict[str, Any]]]:
    other = next(row["id"] for row in of.tables["issues"] if row["id"] != of.targets["issue_id"])
    return [
        ("close_issue", {"issue_id": other}),
        ("assign_issue", {"issue_id": other, "user": "Somebody"}),
        ("assign_issue", {"issue_id": of.targets["issue_id"], "user": "Somebody"}),
    ]


def damage_shop(of: Scenario) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("create_order", {**of.targets, "quantity": of.slots["n"]}),
        ("create_order", {**of.targets, "quantity": 1}),
    ]


def damage_screen(of: Scenario) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("computer", {"action": "left_click", "coordinate": [0, 0]}),
        *plan_calls(of),
    ]


DAMAGE: dict[str, Callable[[Scenario], list[tuple[str, dict[str, Any]]]]] = {
    "booking": damage_booking,
    "tracker": damage_tracker,
    "shop": damage_shop,
    "screen": damage_screen,
}


@pytest.mark.parametrize(("env_key", "kind"), KINDS)
def test_collateral_damage_fails_a_solved_task(env_key: str, kind: str) -> None:
    source = verifier_source(env_key, kind)
    for instance in examples(env_key, kind, 10):
        for call in DAMAGE[env_key](instance.scenario):
            instance.reset()
            solve(instance)
            instance.call(*call)
            assert grade(source, instance) == 0, call


@pytest.mark.parametrize(("env_key", "kind"), KINDS)
def test_a_change_that_no_tool_can_make_fails_too(env_key: str, kind: str) -> None:
    instance = examples(env_key, kind, 1)[0]
    table = next(iter(instance.scenario.tables))
    solve(instance)
    sql = f"insert into {table} select id + 500, {', '.join(columns(instance, table))} from {table}"
    instance.query("current", sql, read_only=False)
    assert grade(verifier_source(env_key, kind), instance) == 0


def columns(instance: Instance, table: str) -> list[str]:
    return [row[1] for row in instance.query("seed", f"pragma table_info({table})").rows][1:]


@pytest.mark.parametrize(("env_key", "kind"), KINDS)
def test_a_verifier_returns_its_checks_prints_nothing_and_queries_little(
    env_key: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = verifier_source(env_key, kind)
    instance = examples(env_key, kind, 1)[0]
    idle = run_verifier(source, instance, "")
    assert idle.failed
    assert not idle.passed, "doing nothing earns no partial reward"
    assert idle.queries <= 6
    solve(instance)
    solved = run_verifier(source, instance, "")
    assert not solved.failed
    assert solved.passed
    assert capsys.readouterr().out == "", "what is printed can hold what a policy wrote"


def test_no_tool_shows_the_facts() -> None:
    instance = open_instance("shop", "train-000000")
    facts = dict(instance.query("seed", "select name, value from task_facts").rows)
    assert facts["kind"] == "order"
    assert facts["item_id"] == str(draw_scenario("shop", "train-000000").targets["item_id"])
    with pytest.raises(ToolError, match="not found"):
        instance.call("find_item", {"item": "kind"})
