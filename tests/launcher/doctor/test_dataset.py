"""Tasks that a run would select: none, unknown ones, or fewer than its file has."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flotilla_environments.tasks import make_task
from flotilla_launcher.cli.app import app
from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import check, emulator, probed, spec, subject


def write(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text(json.dumps(tasks))
    return path


def task(env_key: str, number: int, **changes: Any) -> dict[str, Any]:
    return {**make_task(env_key, "train", number), **changes}


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return write(
        tmp_path / "three.json",
        task("booking", 0, difficulty=1),
        task("booking", 1, difficulty=2),
        task("tracker", 0),
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("modality=computer_use", ("modality = computer_use: 0 of 3", "these have tool_use")),
        ("difficulty=[3]", ("difficulty = 3: 0 of 3", "these have 1, 2, no difficulty")),
        ("data_version=v9", ("data_version = v9: 0 of 3",)),
        ("env_keys=bookings", ("learner.select.env_keys:", "no environment 'bookings'", "booking")),
    ],
)
async def test_a_selection_that_leaves_nothing_is_named_in_the_learners_words(
    policy: Path, three: Path, tmp_path: Path, override: str, words: tuple[str, ...]
) -> None:
    content = spec(policy, three, f"learner.select.{override}")
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, str(three), *words, "correct learner.select")


async def test_tasks_on_a_screen_are_refused_where_the_policy_sees_nothing(
    policy: Path, tmp_path: Path
) -> None:
    screen = task("tracker", 0, task_modality="computer_use")
    content = spec(policy, write(tmp_path / "two.json", task("booking", 0), screen))
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, "1 of 2 tasks", repr(screen["key"]), "[policy.vision]")


async def test_tasks_that_are_unchecked_are_counted_unless_a_command_checks_them_later(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    checks = tmp_path / "checks.jsonl"
    checks.write_bytes(b"")
    content = spec(policy, three)
    content["learner"]["select"] = {"checked": True, "checks": str(checks)}
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, "3 of 3 tasks", "are unchecked", "flotilla data check SPEC")
    checks.unlink()
    content["prepare"] = [{"creates": str(checks), "command": ["python", "-m", "check"]}]
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.OK)


@pytest.mark.parametrize("names_folder", [False, True])
async def test_files_that_one_prepare_command_makes_together_are_all_made_later(
    policy: Path, tmp_path: Path, names_folder: bool
) -> None:
    train, heldout = tmp_path / "train.json", tmp_path / "heldout.json"
    content = spec(policy, train)
    content["learner"]["eval"] = {"sets": [{"name": "heldout", "tasks": str(heldout)}]}
    named = ["--out", str(tmp_path)] if names_folder else ["--heldout", str(heldout)]
    command = ["python", "-m", "split", *named]
    content["prepare"] = [{"creates": str(train), "command": command}]
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.SKIPPED, f"{train} is made by [[prepare]]", f"{heldout} is made by")
    # A command that does not run again makes nothing.
    write(train, task("booking", 0))
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, f"{heldout}: ", "there is no such task file")


async def test_tasks_that_are_not_those_of_the_manifest_are_found_before_machines_are_rented(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    prepared = CliRunner().invoke(
        app, ["data", "prepare", str(three), "--out", str(tmp_path / "data")]
    )
    assert prepared.exit_code == 0, prepared.output
    content = spec(policy, three, f"learner.data={tmp_path / 'data/manifest.json'}")
    result = await probed("dataset", subject(content, tmp_path))
    assert result.status is Status.OK
    write(three, *(task("booking", n, difficulty=n + 1) for n in range(3)))
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, f"learner.data: 1 tasks of {three}", "which is not in it")


async def test_a_selection_that_empties_an_evaluation_set_is_named_with_its_file(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    heldout = write(tmp_path / "heldout.json", task("tracker", 1))
    content = spec(policy, three, "learner.select.env_keys=booking")
    content["learner"]["eval"] = {"sets": [{"name": "heldout", "tasks": str(heldout)}]}
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.WARN, f"leaves none of the 1 tasks of {heldout}", "these have tracker")
    check(result, Status.WARN, f"2 of the 3 tasks of {three} are used")
    heldout.write_text('{"tasks": []}')
    check(await probed("dataset", subject(content, tmp_path)), Status.WARN, "has no tasks")


async def test_an_evaluation_set_is_shown_by_environment_as_it_is_counted(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    held = [task(env, number) for env in ("booking", "tracker") for number in range(10, 20)]
    heldout = write(tmp_path / "heldout.json", *held)
    content = spec(policy, three)
    sets = {"name": "heldout", "tasks": str(heldout), "count": 9}
    content["learner"]["eval"] = {"sets": [sets]}
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.OK, "set heldout: 9 tasks, 5 of booking, 4 of tracker")
    check(result, Status.OK, f"9 of the 20 tasks of {heldout} are used")
    sets["count"] = 3
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.WARN, "3 tasks, 2 of booking, 1 of tracker: few", "raise its count")


async def test_an_evaluation_set_that_is_trained_on_is_refused(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    content = spec(policy, three)
    content["learner"]["eval"] = {"sets": [{"name": "heldout", "tasks": str(three)}]}
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, "3 of the 3 tasks of the set 'heldout'", "also trained on")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ("2 tasks of booking, 1 tasks of tracker",)),
        (("env_keys=booking",), ("2 of the 3 tasks", "2 tasks of booking")),
        (("env_keys=booking", "max_tasks=1"), ("1 of the 3 tasks", "1 tasks of booking")),
    ],
)
async def test_what_is_counted_is_what_is_used(
    policy: Path, three: Path, tmp_path: Path, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    content = spec(policy, three, *(f"learner.select.{override}" for override in overrides))
    check(await probed("dataset", subject(content, tmp_path)), Status.OK, *words)


async def test_a_task_file_that_the_learner_would_refuse_fails(
    policy: Path, tmp_path: Path
) -> None:
    twice = write(tmp_path / "twice.json", task("booking", 0), task("booking", 0))
    result = await probed("dataset", subject(spec(policy, twice), tmp_path))
    check(result, Status.FAIL, f"{twice}: two tasks have the key", "; correct the file")
    assert "learner.select" not in result.detail


async def test_canaries_are_opened_only_in_environments_of_tasks_that_are_used(
    policy: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "two.json", task("tracker", 0, env_id="teleporter"), task("booking", 0))

    async def opened(*overrides: str) -> Any:
        return await probed("episodes", subject(spec(policy, path, *overrides), tmp_path))

    check(await opened(), Status.FAIL, "teleporter cannot be opened", "booking: 4 tools")
    one = await opened("learner.select.env_keys=booking")
    check(one, Status.OK, "booking: graded ", "nothing has changed since")
    assert "teleporter" not in one.detail
    # The probe `dataset` fails because of it.
    none = await opened("learner.select.difficulty=[3]")
    check(none, Status.SKIPPED, "there is no task to open: learner.select leaves none")


async def test_fleet_is_queried_only_for_environments_of_used_tasks(
    policy: Path, three: Path, tmp_path: Path
) -> None:
    with emulator("a-key-of-tests", "--tasks", str(three), "--env", "booking") as url:

        async def request(*overrides: str) -> Any:
            backend = ("env_gateway.backend=fleet", f"env_gateway.backends.fleet.url={url}")
            content = spec(policy, three, *backend, *overrides)
            return await probed(
                "dataset", subject(content, tmp_path, FLEET_API_KEY="a-key-of-tests")
            )

        check(await request(), Status.FAIL, "Fleet has no environment tracker")
        check(await request("learner.select.env_keys=booking"), Status.OK)


async def test_json_lines_are_examined_and_a_task_is_refused_by_its_line(
    policy: Path, tmp_path: Path
) -> None:
    lines = [json.dumps(task("booking", number)) for number in (0, 1)]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    result = await probed("dataset", subject(spec(policy, path), tmp_path))
    check(result, Status.OK, "2 tasks of booking")
    path.write_text("\n".join([*lines, json.dumps(task("booking", 2, task_modality="smell"))]))
    result = await probed("dataset", subject(spec(policy, path), tmp_path))
    check(result, Status.FAIL, f"{path}: line 3 (booking-train-000002): task_modality 'smell'")


async def test_an_evaluation_of_what_is_trained_on_under_other_keys_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    train = write(tmp_path / "train.json", task("booking", 0), task("booking", 1))
    held = write(tmp_path / "held.json", task("booking", 1, key="other"))
    content = spec(policy, train)
    content["learner"]["eval"] = {"sets": [{"name": "heldout", "tasks": str(held)}]}
    result = await probed("dataset", subject(content, tmp_path))
    check(result, Status.FAIL, "1 under another key (other as booking-train-000001)")
