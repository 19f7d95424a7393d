"""The commands that repeat a run."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla_reading.metric_series import MetricSeries
from flotilla_reading.report.reproduction import list_commands
from flotilla_reading.report.run_facts import ReportedRun

SPEC: dict[str, Any] = {
    "learner": {"data": "build/data/manifest.json"},
    "written_by": {"version": "0.1.0", "commit": "ab" * 20},
}
MANIFEST: dict[str, Any] = {
    "source": {"kind": "file", "url": "-my tasks.json", "version": "v2"},
    "filters": {"env": ["shop", "tracker"], "max_tasks": None, "strict": True, "allow": []},
    "split": {"eval_ratio": "1/10", "eval_min": 5, "held_out": []},
    "keep_split": {"path": "old", "sha256": "x"},
    "quarantine": None,
}
RUN = ReportedRun(
    run_id="demo-1",
    about={},
    spec=SPEC,
    summary={},
    metrics=MetricSeries(Path("none")),
    evals=[],
    rewards={},
    alarms=[],
    manifest=MANIFEST,
    writers=[],
    starts=1,
    analysis={},
    problems=[],
)


def test_they_name_the_commit_and_how_the_data_were_prepared() -> None:
    checkout, setup, prepare, train = list_commands(RUN)
    assert (checkout, setup) == (f"git checkout {'ab' * 20}", "make setup")
    assert shlex.split(prepare) == [
        *("flotilla", "data", "prepare", "--out", "build/data", "--data-version=v2"),
        *("--env=shop,tracker", "--strict", "--eval-ratio=1/10", "--eval-min=5"),
        *("--keep-split=old", "--", "-my tasks.json"),
    ]
    assert train == "flotilla train demo-1.json"


def test_data_that_the_spec_makes_need_no_command() -> None:
    made = {**SPEC, "prepare": [{"creates": "build/data", "command": ["x"]}]}
    assert not any("prepare" in line for line in list_commands(replace(RUN, spec=made)))


@pytest.mark.parametrize(
    ("change", "comment"),
    [
        ({"written_by": {"commit": "ab-dirty"}}, "had been changed since this commit"),
        ({"learner": {"api_key": "***"}}, "Secrets in this file are shown as ***"),
    ],
)
def test_what_they_cannot_repeat_is_said(change: dict[str, Any], comment: str) -> None:
    lines = list(list_commands(replace(RUN, spec={**SPEC, **change})))
    assert [line for line in lines if line.startswith("#") and comment in line]
    assert not any(line.endswith("-dirty") for line in lines)
