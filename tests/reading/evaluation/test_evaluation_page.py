"""The worked example of docs/evaluation.md is what its commands print."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_tasks
from tests.support.repository import ROOT
from tests.support.scripted_model import Say, call, serve_model
from tests.support.worked_examples import read_examples

PAGE = (ROOT / "docs/evaluation.md").read_text()
PORTS = ("8000", "8001")


def solves(often: Sequence[int]) -> Say:
    """A model that solves, of its attempts at the n-th task, the first `often[n % len(often)]` of
    every 2, and else says that it is done."""
    tasks = tuple(make_tasks(("booking", "tracker", "shop"), "heldout", 36))
    begun: Counter[str] = Counter()

    def say(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        prompt = messages[0]["content"]
        number, task = next((n, t) for n, t in enumerate(tasks) if prompt.endswith(t["prompt"]))
        if len(messages) == 1:
            begun[task["key"]] += 1
            if (begun[task["key"]] - 1) % 2 >= often[number % len(often)]:
                return {"content": "It is done."}
        turn, plan = sum(each["role"] == "assistant" for each in messages), plan_calls(task)
        if turn == len(plan):
            return {"content": "It is done."}
        name, arguments = plan[turn]
        return {"tool_calls": [call(name, json.dumps(arguments), turn)]}

    return say


def test_every_command_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    examples = read_examples(PAGE)
    assert len(examples) == 3
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    here = Path(sys.executable).parent
    with (
        serve_model(solves((0, 2, 0, 1, 0, 2, 1))) as (before, _),
        serve_model(solves((1, 2, 0, 2, 0, 1, 2))) as (after, _),
    ):
        for command, printed in examples:
            for port, url in zip(PORTS, (before, after), strict=True):
                command = command.replace(f"http://127.0.0.1:{port}/v1", url)
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=tmp_path,
                env={"PATH": f"{here}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert [line.rstrip() for line in done.stdout.splitlines()] == printed
