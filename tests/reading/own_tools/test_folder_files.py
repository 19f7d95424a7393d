"""A folder's files hold what others wrote as data."""

import json
import tomllib
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from flotilla_reading.own_tools.folder_files import (
    FolderPlan,
    ServerWish,
    server_name,
    task_files,
    write_spec,
)
from flotilla_reading.own_tools.task_making import MadeTask
from flotilla_reading.own_tools.toml_text import to_toml
from flotilla_reading.play.solutions import SolutionCall

PLAN = FolderPlan("own", (ServerWish("files", ("serve", "{episode_dir}")),), True, True, True)


@given(st.text())
def test_any_text_survives_in_toml(text: str) -> None:
    assert tomllib.loads(f"a = {to_toml(text)}")["a"] == text.encode(errors="replace").decode()


def test_a_spec_says_what_was_planned_with_a_comment_at_every_choice() -> None:
    command = ("serve", '"\n[learner]\nsteps = 1', "{episode_dir}")
    server = ServerWish("files", command, env={"A": "$B"}, read_only=("look",))
    spec = tomllib.loads(write_spec(replace(PLAN, servers=(server,))))
    (table,) = spec["env_gateway"]["servers"]
    assert (tuple(table["command"]), table["env"]) == (command, {"A": "$B"})
    assert (table["template"], table["state_in_folder"]) == ("state", True)
    assert table["read_only_tools"] == ["look"]
    assert spec["env_gateway"]["environments"]["own"]["servers"] == ["files"]
    assert spec["learner"]["steps"] == 100


def test_every_key_of_a_spec_has_a_comment_above_it() -> None:
    stdio = ServerWish("files", ("node",), env={"A": "b"}, read_only=("look",))
    shared = ServerWish("far", url="https://tools.example/mcp", key_env="TOOLS_KEY")
    lines = write_spec(replace(PLAN, servers=(stdio, shared))).splitlines()
    keys = [(above, line) for above, line in pairwise(lines) if " = " in line and line[0] != "#"]
    assert [line for above, line in keys if above[:1] != "#"] == []


def test_a_shared_server_is_named_by_its_url() -> None:
    server = ServerWish("crm", url="https://crm.example.com/mcp", key_env="CRM_KEY")
    (table,) = tomllib.loads(write_spec(replace(PLAN, servers=(server,))))["env_gateway"]["servers"]
    assert table == {"name": "crm", "url": server.url, "api_key_env": "CRM_KEY"}


def test_servers_have_names_of_their_own() -> None:
    assert server_name("Ünï Files!", []) == "n-files"
    assert server_name("", ["server"]) == "server-2"


def test_held_out_tasks_are_neither_trained_on_nor_demonstrated() -> None:
    tasks = [
        MadeTask(f"Add {n}.", (SolutionCall("add", {"n": n}),), ("ok",), {"state": []})
        for n in range(9)
    ]
    files = task_files("own", (), tasks, 3, seed=0)
    rows = {
        name: [json.loads(line) for line in content.splitlines()] for name, content in files.items()
    }
    trained, heldout = (
        {row["prompt"] for row in rows[name]}
        for name in ("tasks/train.jsonl", "tasks/heldout.jsonl")
    )
    assert (len(trained), len(heldout), trained & heldout) == (6, 3, set())
    shown = {row["messages"][0]["content"] for row in rows["demonstrations.jsonl"]}
    assert shown == trained
    assert len(rows["solutions.jsonl"]) == 9
