"""A working directory whose modules have the names of ours and of Python's."""

import ast
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import ENVIRONMENTS, FaultRun, spec
from tests.launcher.cli.test_app import nothing_left, write_spec
from tests.support.repository import ROOT

DIGESTS = "environments/flotilla_environments/verifiers.sha256"
FLOTILLA = Path(sys.executable).with_name("flotilla")
# Of ours, of Python's, of vendors'.
NAMES = (
    *("services", "environments", "tools", "child"),
    *("json", "asyncio", "typing"),
    *("grpc", "pydantic", "numpy", "torch", "safetensors", "transformers", "aiohttp", "mcp"),
)
# They name the interpreter without running a module or a program of ours by it.
EXCEPTIONS = {
    "services/common/flotilla_common/process/python_command.py",
    # A user's command that begins with `python`.
    "services/launcher/flotilla_launcher/control/prepare_commands.py",
    "services/common/flotilla_common/process/spec_commands.py",
    # Shows it in an error.
    "services/launcher/flotilla_launcher/cli/tool_commands.py",
    "services/common/flotilla_common/process/tied_child.py",
    # By path, and it puts another folder in place of its own.
    "services/env_gateway/flotilla_env_gateway/adapters/fleet_openenv/backend.py",
    # Isolated altogether, by -I.
    "services/env_gateway/flotilla_env_gateway/verify/sandbox.py",
    "services/common/flotilla_common/process/tied_children.py",
    "services/env_gateway/flotilla_env_gateway/verify/verifier_finder.py",
    # Remembers by which interpreter an episode was played.
    "services/launcher/flotilla_launcher/doctor/canary_results.py",
    # Names the launcher's interpreter for what runs it by `python_command.python_command`.
    "services/launcher/flotilla_launcher/security/launcher_address.py",
    # `sky` is next to the interpreter.
    "services/launcher/flotilla_launcher/cli/far_run_files.py",
    # Hand an interpreter on to what runs it by `python_command.python_command`.
    "services/launcher/flotilla_launcher/cli/demo_environment.py",
    "services/launcher/flotilla_launcher/doctor/run_context.py",
    "services/launcher/flotilla_launcher/doctor/clouds.py",
    # Compares its path with a folder that an episode's process does not see.
    "services/env_gateway/flotilla_env_gateway/adapters/mcp/episode_process.py",
    # Find a program that was installed beside them.
    "tools/python_versions.py",
    "tools/wheel_check.py",
    "tools/requirements.py",
    "tools/model_zoo/registries.py",
}


def users_folder(folder: Path) -> Path:
    """A user's project, with packages and modules that nothing of ours may import."""
    folder.mkdir()
    for number, name in enumerate(NAMES):
        path = folder / name / "__init__.py" if number % 2 == 0 else folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise SystemExit('{name} of the working directory was imported')\n")
    return folder


async def flotilla(cwd: Path, *words: str, **environment: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(FLOTILLA, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=cwd,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 280.0)
    return process.returncode, output.decode()


@pytest.mark.slow
async def test_a_run_in_a_project_with_a_services_package_of_its_own_completes(
    tmp_path: Path,
) -> None:
    project = users_folder(tmp_path / "project")
    path = write_spec(tmp_path, learner={"steps": 2})
    code, output = await flotilla(project, "train", str(path))
    assert code == 0, output
    assert "step 2/2" in output
    await nothing_left(project / "runs")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("gateway", ["embedded", "mcp"])
async def test_all_that_a_run_starts_is_ours_wherever_it_is_started(
    tmp_path: Path, policy: Path, tasks: Path, gateway: str
) -> None:
    wish: dict[str, Any] = spec(policy, tasks, steps=2)
    # They are the repository's, whose verifiers are trusted.
    wish["env_gateway"]["verifiers"]["digests"] = str(ROOT / DIGESTS)
    if gateway == "mcp":
        mcp = {"command": ["python", "-P", "-m", ENVIRONMENTS], "instances": True}
        wish["env_gateway"] |= {"backend": "mcp", "servers": [mcp]}
    run = FaultRun(tmp_path, wish)
    project = users_folder(tmp_path / "project")
    code, output = await flotilla(
        *(project, "train", str(run.path), "--runs", str(run.runs)),
        FLOTILLA_TEST_TASKS=str(tasks),
        OMP_NUM_THREADS="1",
    )
    assert code == 0, f"{output}\n{run.state()}"
    await run.check_end(2)
    for words in (("show", "newest"), ("export", "newest", "--out", str(tmp_path / "model"))):
        code, output = await flotilla(project, *words, "--runs", str(run.runs))
        assert code == 0, output


def test_every_python_that_we_start_leaves_the_working_directory_out() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("services", "environments", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if _names_the_interpreter(path) and '(sys.executable, "-P"' not in path.read_text()
    }
    assert found == EXCEPTIONS


def _names_the_interpreter(path: Path) -> bool:
    source = path.read_text()
    return "executable" in source and any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
        for node in ast.walk(ast.parse(source))
    )
