"""Output of `flotilla status`: whole ids, the held-out figure as such, and stable JSON."""

import io
import json
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli.status_json import format_status_json
from flotilla_launcher.cli.status_text import make_runs_table, print_run, print_table
from flotilla_launcher.cli.terminal import Terminal

RUN_ID = "a-spec-with-a-rather-long-name-for-one-terminal-20261122-180359"


def a_run(**changes: Any) -> pb.Run:
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "name": "a-spec",
        "state": pb.RUN_STATE_RUNNING,
        "mode": pb.RUN_MODE_TRAIN,
        "create_time": Timestamp(seconds=1_700_000_000),
        "step": 3,
        "total_steps": 8,
        "backend": "local",
        "directory": f"/data/{RUN_ID}",
        "metrics": {"reward/avg_pass_at_1": 0.75, "eval/all/pass_at_1": 0.5},
        "replicas": [
            pb.ServiceReplica(
                service="learner",
                state="running",
                phase="sampling",
                address="127.0.0.1:40001",
                pid=77,
                metrics_address="127.0.0.1:40002",
            )
        ],
        "alarms": [
            alarm_pb.Alarm(
                rule="no_reward",
                scope="shop",
                severity=alarm_pb.ALARM_SEVERITY_WARNING,
                step=3,
                cause="it [never] calls a tool",
                fix="look at its attempts",
            )
        ],
        **changes,
    }
    return pb.Run(**values)


def printed(run: pb.Run | None, width: int) -> str:
    console = Terminal(record=True, width=width, file=io.StringIO(), force_terminal=False)
    if run is None:
        print_table(make_runs_table([a_run(), a_run(run_id="other", metrics={})]), console)
    else:
        print_run(run, lambda path: path, console, alone=False)
    return console.export_text()


@pytest.mark.parametrize("width", [20, 80, 300])
def test_ids_and_addresses_are_whole_however_narrow_the_terminal_is(width: int) -> None:
    listed, one = printed(None, width), printed(a_run(), width)
    assert RUN_ID in listed and "…" not in listed
    assert "127.0.0.1:40001" in one and "http://127.0.0.1:40002/metrics" in one
    assert "alarm: no_reward of shop, since step 3: it [never] calls a tool. look at" in one


@pytest.mark.parametrize("width", [40, 80, 300])
def test_no_table_is_wider_than_the_terminal_and_none_loses_a_cell(width: int) -> None:
    console = Terminal(record=True, width=width, file=io.StringIO(), force_terminal=True)
    print_table(make_runs_table([a_run(run_id="short-20261122")]), console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    cells = ("short-20261122", "running", "train", "2023-11-14 22:13:20", "3/8", "75.0%")
    assert all(any(cell in line for line in lines) for cell in cells), lines


def test_the_held_out_figure_is_not_that_of_training() -> None:
    head, first, second = printed(None, 200).splitlines()
    assert head.split()[-4:] == ["TRAINING", "PASS@1", "HELD-OUT", "PASS@1"]
    assert first.split()[-3:] == ["3/8", "75.0%", "50.0%"]
    assert second.split()[-2:] == ["-", "-"]


RUN_FIELDS: dict[str, Any] = {
    "run_id": RUN_ID,
    "name": "a-spec",
    "state": "running",
    "mode": "train",
    "backend": "local",
    "created": "2023-11-14T22:13:20Z",
    "ended": None,
    "step": 3,
    "total_steps": 8,
    "held_out_pass_at_1": 0.5,
    "training_pass_at_1": 0.75,
    "outcome": None,
    "error": "",
    "priority": 0,
    "queue_place": None,
    "waiting": "",
    "unreachable": "",
    "cleanup": None,
    "cleanup_detail": "",
    "cost": {
        "accrued": 0.0,
        "per_hour": 0.0,
        "tokens": {"prompt": 0, "sampled": 0, "trained": 0},
    },
    "metrics": {"reward/avg_pass_at_1": 0.75, "eval/all/pass_at_1": 0.5},
}


def test_json_has_the_documented_fields() -> None:
    answer = json.loads(format_status_json([a_run()], attended=True))
    assert (answer["version"], answer["attended"], answer["more"]) == (1, True, 0)
    (run,) = answer["runs"]
    (alarm,), (service,) = run.pop("alarms"), run.pop("services")
    assert run.pop("directory") == f"/data/{RUN_ID}"
    assert run == RUN_FIELDS
    assert alarm == {
        "rule": "no_reward",
        "scope": "shop",
        "severity": "warning",
        "step": 3,
        "cause": "it [never] calls a tool",
        "fix": "look at its attempts",
    }
    assert service == {
        "service": "learner",
        "replica": 0,
        "state": "running",
        "phase": "sampling",
        "address": "127.0.0.1:40001",
        "metrics_address": "127.0.0.1:40002",
        "restarts": 0,
        "pid": 77,
    }


def test_a_figure_that_is_not_finite_is_null_in_json() -> None:
    text = format_status_json([a_run(metrics={"policy/loss": float("nan")})], attended=False)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse)["runs"][0]["metrics"] == {"policy/loss": None}


def test_a_run_in_the_queue_has_its_place_in_the_list_and_the_reason_below_its_state() -> None:
    run = a_run(state=pb.RUN_STATE_QUEUED, queue_place=2, waiting="run b holds GPU 0")
    console = Terminal(record=True, width=200, file=io.StringIO(), force_terminal=False)
    print_table(make_runs_table([run]), console)
    assert f"{RUN_ID}  queued (2)  train" in console.export_text()
    assert printed(run, 200).splitlines()[1] == "place 2 in the queue: run b holds GPU 0"
    answer = json.loads(format_status_json([run], attended=True))["runs"][0]
    assert (answer["queue_place"], answer["waiting"]) == (2, "run b holds GPU 0")


def test_tokens_that_a_service_bills_are_shown_with_their_limit() -> None:
    tokens = pb.TokenCount(prompt=1_000_000, sampled=200_000, trained=30_000)
    run = a_run(cost=pb.Cost(accrued=1.5, tokens=tokens, max_tokens=2_000_000))
    text = printed(run, 300)
    assert (
        "cost $1.50 ($0.00/h), tokens 1,230,000 of 2,000,000"
        " (prompt 1,000,000, sampled 200,000, trained 30,000)"
    ) in text
    (shown,) = json.loads(format_status_json([run], attended=True))["runs"]
    assert shown["cost"]["tokens"] == {"prompt": 1_000_000, "sampled": 200_000, "trained": 30_000}
    assert "tokens" not in printed(a_run(), 300)
