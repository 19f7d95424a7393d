"""What a spec prepares is made before the doctor looks, which then looks at it."""

import json
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.launcher.doctor.gate import doctor_gate
from services.launcher.ports import Hooks
from tests.launcher.doctor.support import spec
from tests.launcher.harness import serving


async def test_the_doctor_looks_at_what_was_just_made(policy: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    program = f"open({str(tasks)!r}, 'w').write('[]')"
    table = {"creates": str(tasks), "command": ["python", "-c", program]}
    async with serving(tmp_path, hooks=Hooks(gate=doctor_gate)) as served:
        run = await served.ended(await served.start({**spec(policy, tasks), "prepare": [table]}))
    assert json.loads(tasks.read_text()) == []
    assert run.state == pb.RUN_STATE_FAILED
    assert f"dataset: learner.tasks: {tasks} holds no task" in run.error
