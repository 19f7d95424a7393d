"""A run that the doctor refuses, as its user sees it on the screen."""

import io
import json
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli import train
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.ports import LauncherHooks, PendingRun, RunRefusedError
from flotilla_launcher.security import launcher_address
from tests.support.launcher import TOKEN, serving, spec

MESSAGE = "the doctor found what would fail:\nports: port 7 cannot be had: stop what listens there"


async def refuse(intent: PendingRun) -> list[str]:
    raise RunRefusedError(MESSAGE)


async def test_a_refusal_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    async with serving(tmp_path, hooks=LauncherHooks(gate=refuse)) as served:
        address = {"address": served.address, "token": TOKEN, "pid": 1}
        monkeypatch.setenv(launcher_address.REMOTE_VARIABLE, json.dumps(address))
        wished = pb.StartRunRequest(spec_json=json.dumps(spec()), mode=pb.RUN_MODE_TRAIN)
        request = train.TrainRequest(spec(), "spec.json", wished, "resume", "begin")
        code = await train._run_request(request, tmp_path, Terminal(file=output), Interrupts())  # pyright: ignore[reportPrivateUsage]
    assert code == train.FAILED
    assert output.getvalue().count(MESSAGE) == 1, output.getvalue()
    assert " failed: " + MESSAGE in output.getvalue()
