"""The real wandb, without a network: its offline files, which `wandb sync` uploads."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.free_ports import free_port
from tests.learner.tracking.adapters.wandb_server import wandb_server
from tests.learner.tracking.dumped_steps import dump_steps

_BLOCK = 32768
_HEADER = 7


def log(
    folder: Path,
    first: int,
    last: int,
    *,
    resumed: bool = False,
    end: str = "close",
    mode: str = "auto",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a process that logs these steps."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    module = "tests.learner.tracking.adapters.wandb_process"
    how = "resumed" if resumed else "new"
    return subprocess.run(
        [sys.executable, "-m", module, str(folder), str(first), str(last), how, end, mode],
        # Without a home there is no netrc with a key.
        env={**kept, "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def records(folder: Path) -> Iterator[Any]:
    """Return the records of all offline files, in the order they were begun: a LevelDB log of
    protobuf messages."""
    # Every worker imports all tests: wandb is imported where it is used.
    from wandb.proto import wandb_internal_pb2

    made: Any = wandb_internal_pb2
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        data, position, whole = path.read_bytes(), _HEADER, b""
        while position + _HEADER <= len(data):
            left = _BLOCK - position % _BLOCK
            if left < _HEADER:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            whole += data[position + _HEADER : position + _HEADER + length]
            position += _HEADER + length
            if kind in (1, 4):
                record = made.Record()
                record.ParseFromString(whole)
                whole = b""
                yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """The points, without wandb's own names."""
    points: list[dict[str, Any]] = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            named = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            points.append({name: v for name, v in named.items() if not name.startswith("_")})
    return points


def runs(folder: Path) -> list[Any]:
    return [r.run for r in records(folder) if r.WhichOneof("record_type") == "run"]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a key that was killed after step 2 and resumed to step 11.

    The dump of step 10 is there; the next one due, of step 20, is not."""
    folder = tmp_path_factory.mktemp("offline")
    dump_steps(folder, 10)
    assert log(folder, 1, 2, end="kill").returncode < 0
    done = log(folder, 3, 11, resumed=True)
    assert done.returncode == 0, done.stderr
    assert "no API key was found" in done.stdout + done.stderr
    assert "its page: None" in done.stdout
    return folder


def test_without_a_key_the_run_is_kept_offline_with_its_points(offline: Path) -> None:
    points = history(offline)
    losses = [(p["step"], p["policy/loss"]) for p in points if "policy/loss" in p]
    assert losses == [(step, step / 2) for step in range(1, 12)]
    assert [p["step"] for p in points if "eval/all/pass_at_1" in p] == [2]
    assert points[0]["reward/distribution/bins"] == [0, 1, 2]
    assert points[0]["reward/distribution/values"] == [3, 1]


def test_a_run_has_its_name_its_project_and_its_spec_without_secrets(offline: Path) -> None:
    run, _ = runs(offline)
    assert (run.run_id, run.display_name, run.project) == ("0123abcd", "my-run", "fleet-task-grpo")
    assert (run.run_group, list(run.tags)) == ("tests", ["a"])
    config = {item.key: item.value_json for item in run.config.update}
    assert json.loads(config["learner"]) == {"steps": 4, "chat": {"webhook": "***"}}


def test_sampled_episodes_of_a_dump_are_a_table_at_their_step(offline: Path) -> None:
    tables = [point for point in history(offline) if "episodes/path" in point]
    assert [point["step"] for point in tables] == [10]
    [path] = (offline / "wandb").glob(f"offline-run-*/files/{tables[0]['episodes/path']}")
    table = json.loads(path.read_text())
    assert len(table["data"]) == tables[0]["episodes/nrows"] == 8
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert first == {
        "step": 10,
        "group": "g0",
        "attempt": "0/0",
        "prompt": "prompt 0",
        "answer": "answer 0",
        "reward": 0.5,
        "stop_reason": "answered",
        "advantage": 0.25,
    }


def test_a_killed_run_resumes_under_its_id_with_each_step_once(offline: Path) -> None:
    assert [run.run_id for run in runs(offline)] == ["0123abcd", "0123abcd"]
    steps = [point["step"] for point in history(offline) if "policy/loss" in point]
    assert steps == list(range(1, 12))


@pytest.mark.slow
def test_a_key_without_a_network_goes_offline_and_warns(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    store = {"AWS_SECRET_ACCESS_KEY": "canary-of-a-store", "MY_LOGIN": "canary-of-mine"}
    given = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": url, **store}
    done = log(tmp_path, 1, 1, resumed=False, **given)
    assert done.returncode == 0, done.stderr
    assert "cannot be reached" in done.stdout + done.stderr
    assert [point["step"] for point in history(tmp_path)] == [1]
    # Its process was given its own key and no other.
    [output] = [line for line in done.stdout.splitlines() if line.startswith("wandb's process has")]
    variables = set(output.split())
    assert {"WANDB_API_KEY", "WANDB_BASE_URL", "PATH", "HOME"} <= variables
    assert not store.keys() & variables


def test_mode_online_does_not_start_without_a_key(tmp_path: Path) -> None:
    done = log(tmp_path, 1, 1, mode="online")
    assert done.returncode == 1
    assert "set WANDB_API_KEY" in done.stderr


@pytest.mark.slow  # wandb sends what it has every 15 seconds
def test_a_resumed_run_continues_its_run_on_the_server(tmp_path: Path) -> None:
    """The second start appends to what the server has, and overwrites none of it."""
    with wandb_server() as server:
        online = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url}
        for first, last, resumed in ((1, 2, False), (3, 4, True)):
            done = log(tmp_path, first, last, resumed=resumed, mode="online", **online)
            assert done.returncode == 0, done.stderr
            assert f"its page: {server.url}/me/p/runs/0123abcd" in done.stdout
        assert set(server.announced) == {"0123abcd"}
        points = server.lines("0123abcd")
    assert [point["step"] for point in points if "policy/loss" in point] == [1, 2, 3, 4]
    assert [point["_step"] for point in points] == list(range(len(points)))
