"""Selection of tasks: the ones left, the error when none is, and the order that stays."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec_loading import apply_override
from flotilla_common.tasks.task_checks import Outcome, TaskCheck, format_check
from flotilla_common.tasks.task_digests import task_digest
from flotilla_common.tasks.task_format import parse_task
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.run.task_files import load_task_files
from flotilla_learner.sampling.task_filter import (
    TaskFilterError,
    UncheckedTasksError,
    apply_filters,
    filter_tasks,
)
from flotilla_learner.sampling.tasks import Task
from tests.support.learner import make_config, write_tasks

MODALITIES = ("tool_use", "computer_use")


def wish(**values: Any) -> SelectConfig:
    return parse_config(SelectConfig, values, where="learner.select")


def task(name: str, env: str = "shop", **fields: Any) -> Task:
    return Task(name, env, json.dumps(fields))


def many(count: int) -> list[Task]:
    """Three environments, two modalities, difficulties 1 to 3, two data versions."""
    return [
        task(
            f"t{n}",
            f"env{n % 3}",
            task_modality=MODALITIES[n // 3 % 2],
            difficulty=n % 4 or None,
            data_version=f"v{n % 5 // 3}",
        )
        for n in range(count)
    ]


def chosen(tasks: list[Task], seed: int = 0, **values: Any) -> list[str]:
    return [t.key for t in filter_tasks(tasks, wish(**values), path="tasks.json", seed=seed)]


def test_without_a_wish_every_task_is_used_in_the_order_of_the_file() -> None:
    assert chosen(many(60)) == [f"t{n}" for n in range(60)]


def offered(tools: dict[str, Any], tasks: list[Task]) -> list[Any]:
    left = filter_tasks(tasks, wish(tools=tools), path="tasks.json", seed=0)
    assert [t.key for t in left] == [t.key for t in tasks]
    return [json.loads(t.json).get("offered_tools") for t in left]


def test_tools_are_offered_by_environment_or_by_task() -> None:
    tasks = [task("a"), task("b"), task("c", "tracker"), task("d", "tracker", offered_tools=["x"])]
    assert offered({}, tasks) == [None, None, None, ["x"]]
    tools = {"shop": ["buy", "look"], "b": "look", "tracker": ["close"]}
    assert offered(tools, tasks) == [["buy", "look"], ["look"], ["close"], ["close"]]


def test_evaluation_offers_the_tools_that_training_does() -> None:
    (only,) = apply_filters([task("e")], wish(tools={"shop": ["buy"]}), path="eval.json")
    assert json.loads(only.json)["offered_tools"] == ["buy"]


def test_tools_of_what_no_task_has_are_refused() -> None:
    with pytest.raises(TaskFilterError, match=r"has no environment or task 'shpo'.*shop"):
        offered({"shpo": ["buy"]}, [task("a")])
    with pytest.raises(ConfigError, match=r"tools\.shop"):
        wish(tools={"shop": []})


def test_each_filter_leaves_what_it_names_and_all_of_them_what_all_leave() -> None:
    tasks = many(120)
    wishes: dict[str, Any] = {
        "modality": "tool_use",
        "env_keys": ["env0", "env2"],
        "difficulty": [1, 2],
        "data_version": "v0",
    }
    apart = [set(chosen(tasks, **{key: value})) for key, value in wishes.items()]
    assert all(0 < len(left) < 120 for left in apart)
    assert set(chosen(tasks, **wishes)) == set.intersection(*apart) != set()
    assert apart[1] == {t.key for t in tasks if t.env_key != "env1"}


@pytest.mark.parametrize("modality", [None, "", "tool_use"])
def test_a_task_without_modality_is_tool_use(modality: str | None) -> None:
    unnamed = Task("a", "shop", json.dumps({"task_modality": modality}))
    assert chosen([unnamed], modality="tool_use") == ["a"]


@pytest.mark.parametrize("level", [2, "2"])
def test_a_difficulty_may_be_a_number_or_its_text(level: object) -> None:
    assert chosen([task("a", difficulty=level), task("b")], difficulty=[2]) == ["a"]


def test_max_tasks_takes_the_same_tasks_whatever_the_order_of_the_file() -> None:
    tasks = many(200)
    shuffled = random.Random(7).sample(tasks, len(tasks))
    assert set(chosen(tasks, max_tasks=30)) == set(chosen(shuffled, max_tasks=30))
    assert len(chosen(tasks, max_tasks=30)) == 30
    assert chosen(tasks, max_tasks=30) != [t.key for t in tasks[:30]]


def test_another_seed_takes_other_tasks() -> None:
    assert set(chosen(many(200), max_tasks=30)) != set(chosen(many(200), seed=1, max_tasks=30))


@pytest.mark.parametrize("added", [1, 10, 100])
def test_an_added_task_takes_the_place_of_at_most_one_other(added: int) -> None:
    before = set(chosen(many(200), max_tasks=30))
    now = set(chosen(many(200 + added), max_tasks=30))
    new = {f"t{n}" for n in range(200, 200 + added)}
    assert len(now) == 30
    assert len(before - now) == len(now & new) <= added


def test_more_of_max_tasks_keeps_those_of_less() -> None:
    counts = (1, 5, 30, 200, 500)
    sets = [set(chosen(many(200), max_tasks=count)) for count in counts]
    assert all(less <= more for less, more in itertools.pairwise(sets))
    assert len(sets[-1]) == 200


def test_an_environment_that_the_file_does_not_have_is_refused_with_the_one_that_was_meant() -> (
    None
):
    with pytest.raises(TaskFilterError, match=r"tasks\.json has no environment 'env11'.*did you"):
        chosen(many(10), env_keys=["env11"])


def test_an_empty_selection_lists_how_many_tasks_each_filter_left_and_what_there_is() -> None:
    tasks = [task("a", difficulty=1), task("b", difficulty=2), task("c"), task("d", "desk")]
    with pytest.raises(TaskFilterError) as caught:
        chosen(tasks, modality="tool_use", env_keys=["shop"], difficulty=[3])
    assert str(caught.value).splitlines() == [
        "learner.select leaves none of the 4 tasks of tasks.json",
        "  modality = tool_use: 4 of 4",
        "  env_keys = shop: 3 of 4",
        "  difficulty = 3: 0 of 3; these have 1, 2, no difficulty",
    ]


def test_of_many_values_a_few_are_shown() -> None:
    tasks = [task(f"t{n}", data_version=f"v{n:02}") for n in range(40)]
    with pytest.raises(TaskFilterError, match=r"these have v00, .*, v11 and 28 others"):
        chosen(tasks, data_version="w")


def test_what_evaluation_sets_use_is_filtered_but_keeps_all_that_pass() -> None:
    config = wish(env_keys=["env0"], max_tasks=1)
    left = apply_filters(many(30), config, path="heldout.json")
    assert [t.env_key for t in left] == ["env0"] * 10
    with pytest.raises(TaskFilterError, match=r"none of the 1 tasks of heldout\.json"):
        apply_filters([task("a")], config, path="heldout.json")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("--select.env_keys=shop", "env_keys", ("shop",)),
        ("--select.env_keys=shop, desk", "env_keys", ("shop", "desk")),
        ('--select.env_keys=["shop"]', "env_keys", ("shop",)),
        ("--select.env_keys=", "env_keys", ()),
        ("--select.difficulty=2", "difficulty", (2,)),
        ("--select.difficulty=1,2", "difficulty", (1, 2)),
        ("--select.difficulty=[1, 2]", "difficulty", (1, 2)),
        ("--select.max_tasks=100", "max_tasks", 100),
    ],
)
def test_a_command_line_may_list_with_commas(override: str, key: str, value: object) -> None:
    spec: dict[str, Any] = {}
    apply_override(spec, override)
    assert getattr(wish(**spec["select"]), key) == value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("difficulty", "easy", "difficulty.0: Input should be a valid integer"),
        ("difficulty", {"a": 1}, "difficulty: Input should be a valid array"),
        ("env_keys", 7, "env_keys: Input should be a valid array"),
        ("env_keys", [7], "env_keys.0: Input should be a valid string"),
        ("modality", "tools", "modality: Input should be 'tool_use', 'computer_use'"),
        ("env_key", "shop", "env_key: unknown key; did you mean 'env_keys'"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wish(**{key: value})
    assert message in str(caught.value)


def test_the_files_of_a_spec_are_selected_from(tmp_path: Path) -> None:
    heldout = str(write_tasks(tmp_path / "heldout.json", 9, prefix="held"))
    config = make_config(
        tmp_path,
        select={"env_keys": "env1,env2", "max_tasks": 5},
        eval={"sets": [{"name": "heldout", "tasks": heldout, "count": 4}]},
    )
    tasks, (held,) = load_task_files(config, 0, sees_pictures=True)
    assert len(tasks) == 5
    assert {t.env_key for t in tasks} == {"env1", "env2"}
    assert held.by_env == {"env1": 2, "env2": 2}
    with pytest.raises(ConfigError, match=r"learner\.select leaves none of the 12 tasks"):
        load_task_files(make_config(tmp_path, select={"modality": "joint"}), 0, sees_pictures=True)


def test_tasks_on_a_screen_are_refused_where_the_policy_sees_nothing(tmp_path: Path) -> None:
    seen = Path(write_tasks(tmp_path / "heldout.json", 2, prefix="held"))
    tasks = json.loads(seen.read_text())["tasks"]
    seen.write_text(json.dumps([tasks[0], {**tasks[1], "task_modality": "browser_use"}]))
    sets = {"sets": [{"name": "heldout", "tasks": str(seen)}]}
    config = make_config(tmp_path, eval=sets)
    with pytest.raises(ConfigError) as caught:
        load_task_files(config, 0, sees_pictures=False)
    assert f"1 of 2 tasks of {seen} are played on a screen, {tasks[1]['key']!r}" in str(
        caught.value
    )
    assert "add a table [policy.vision]" in str(caught.value)
    load_task_files(config, 0, sees_pictures=True)
    without = make_config(tmp_path, eval=sets, select={"modality": "tool_use"})
    load_task_files(without, 0, sees_pictures=False)


def results(path: Path, verdicts: dict[Task, Outcome]) -> str:
    """A file of results of these tasks."""
    lines = [
        TaskCheck(each.key, each.env_key, digest_of(each), "", 1, verdict, {}, 0.1)
        for each, verdict in verdicts.items()
    ]
    path.write_bytes(b"".join(map(format_check, lines)))
    return str(path)


def digest_of(each: Task) -> str:
    return task_digest(parse_task(each.json), json.loads(each.json))


def whole(key: str, **fields: Any) -> Task:
    return task(key, key=key, prompt="Buy it.", env_id="shop", **fields)


def test_checked_tasks_are_those_that_the_results_call_valid(tmp_path: Path) -> None:
    tasks = [whole("a"), whole("b"), whole("c"), whole("d")]
    found = [Outcome.VALID, Outcome.INVALID, Outcome.ERROR, Outcome.VALID]
    checks = results(tmp_path / "checks.jsonl", dict(zip(tasks, found, strict=True)))
    assert chosen(tasks, checked=True, checks=checks, tools={"a": ["buy"]}) == ["a", "d"]
    (only,) = apply_filters(tasks[3:], wish(checked=True, checks=checks), path="eval.json")
    assert only.key == "d"
    with pytest.raises(TaskFilterError, match=r"none of the 2 tasks .* has 1 error, 1 invalid"):
        chosen(tasks[1:3], checked=True, checks=checks)


def test_tasks_without_a_result_as_they_are_now_are_counted_with_the_command(
    tmp_path: Path,
) -> None:
    checks = results(tmp_path / "checks.jsonl", {whole("a"): Outcome.VALID})
    changed = [whole("a", verifier_func="def verify(env):\n    return 1\n"), whole("b")]
    with pytest.raises(UncheckedTasksError) as caught:
        chosen(changed, checked=True, checks=checks)
    assert "2 of 2 tasks of tasks.json, such as 'a', are unchecked" in str(caught.value)
    assert f"`flotilla data check SPEC tasks.json --out {checks}`" in str(caught.value)
    with pytest.raises(UncheckedTasksError, match=r"No such file.*flotilla data check"):
        chosen(changed, checked=True, checks=str(tmp_path / "missing.jsonl"))


def test_checked_and_checks_need_each_other() -> None:
    with pytest.raises(ConfigError, match=r"it needs checks"):
        wish(checked=True)
    with pytest.raises(ConfigError, match=r"no effect without checked"):
        wish(checks="checks.jsonl")
