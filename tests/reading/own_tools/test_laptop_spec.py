"""The spec of a tiny policy: every service accepts it, and it has the servers unchanged."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.control.spec_check import check_tables
from flotilla_launcher.run_spec import parse_spec
from flotilla_reading.own_tools.folder_files import FolderPlan, ServerWish, write_spec
from flotilla_reading.own_tools.laptop_spec import SPEC, Lengths, write_laptop_spec
from flotilla_reading.own_tools.toml_text import to_toml

LENGTHS = Lengths(prompt=200, demonstration=300, turn=50, turns=4)
HOSTILE = 'a"b\\c\n[policy]\x7f{seed} \u2028 ünicode'
PLAN = FolderPlan(
    "office",
    (
        ServerWish("files", ("node", HOSTILE, "{episode_dir}"), env={"A.B": HOSTILE}),
        ServerWish("far", url="https://tools.example/mcp", key_env="TOOLS_KEY"),
    ),
    has_state=True,
    reuses=True,
    resets=True,
)


def written_from(text: str, **changes: Any) -> dict[str, Any]:
    return tomllib.loads(write_laptop_spec({**tomllib.loads(text), **changes}, LENGTHS, 40))


async def test_every_service_accepts_it(tmp_path: Path) -> None:
    plan = FolderPlan(
        "office", (ServerWish("files", ("true",)),), has_state=False, reuses=True, resets=True
    )
    spec = write_laptop_spec(tomllib.loads(write_spec(plan)), LENGTHS, 2)
    (tmp_path / SPEC).write_text(spec)
    loaded = load_spec(tmp_path / SPEC)
    await check_tables(parse_spec(canonical_json(loaded), SPEC), SPEC)


def test_the_gateway_is_that_of_the_run_spec_with_a_smaller_pool() -> None:
    text = write_spec(PLAN)
    gateway = written_from(text)["env_gateway"]
    assert gateway.pop("warm_starts") == {"size": 18}
    own = tomllib.loads(text)["env_gateway"]
    del own["warm_starts"]
    assert gateway == own
    assert gateway["servers"][0]["command"][1] == HOSTILE.encode(errors="replace").decode()


def test_a_step_has_no_more_than_all_demonstrations() -> None:
    for count, groups, sequences in ((3, 3, 3), (12, 8, 12), (40, 8, 32)):
        spec = tomllib.loads(write_laptop_spec(tomllib.loads(write_spec(PLAN)), LENGTHS, count))
        assert spec["learner"]["groups_per_step"] == groups
        assert spec["learner"]["warm_start"]["sequences_per_step"] == sequences


def test_name_and_seed_are_those_of_the_run_spec() -> None:
    spec = written_from(write_spec(PLAN), name=HOSTILE, seed=3)
    assert (spec["name"], spec["seed"]) == (f"{HOSTILE}-laptop", 3)


def test_the_window_has_room_for_twice_the_longest_demonstration() -> None:
    spec = written_from(write_spec(PLAN))
    window, rollout = spec["policy"]["max_model_len"], spec["rollout"]
    assert window >= LENGTHS.prompt + 2 * (LENGTHS.demonstration - LENGTHS.prompt)
    assert rollout["max_generate_length"] > LENGTHS.turn
    assert rollout["max_input_length"] + rollout["max_generate_length"] == window
    assert rollout["max_turns"] > LENGTHS.turns


@pytest.mark.parametrize(
    "value",
    [HOSTILE, 1, 0.5, True, ["a", HOSTILE], {"a b": [1], "c": {"d": HOSTILE}}, [], {}, [{"a": 1}]],
)
def test_values_are_read_as_they_were(value: Any) -> None:
    assert tomllib.loads(f"value = {to_toml(value)}")["value"] == value
