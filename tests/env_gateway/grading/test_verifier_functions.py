"""Verifiers that are functions of the user's modules, in real processes."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_common.domain.attempts import Grade, NoGradeReason
from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.adapters.replay.record_format import identify_grade
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.grading.grader import VerifierRunner
from flotilla_env_gateway.grading.verifier_files import load_verifiers
from flotilla_env_gateway.grading.verifier_functions import NamedVerifier, load_functions
from flotilla_env_gateway.ports import Submission
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_process import StartError
from tests.env_gateway.verify.sandboxed import needs_sandbox
from tests.support.environment_processes import environment_command
from tests.support.fake_environments import FakeGrader
from tests.support.fake_gateway import open_spec, opened, task_json
from tests.support.waiting import until

PACKAGE = """
import asyncio, os, pathlib, socket, subprocess, sys, threading, time
import numpy
from .words import WORD

def graded(env, final_answer=None):
    notes = env.call_tool("list_notes")
    print("notes", notes)
    return {"score": float(WORD in str(notes)), "rewards": {"length": numpy.float32(len(notes))}}

async def awaited(env, *, final_answer):
    await asyncio.sleep(0.01)
    return final_answer == "done"

def strong(env):
    "What a sandbox forbids."
    thread = threading.Thread(target=socket.socket)
    thread.start()
    thread.join()
    listed = subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True)
    return numpy.bool_(listed.stdout == "3\\n" and os.path.isdir("."))

def secret(env):
    return int("MY_API_KEY" in os.environ)

def raising(env):
    raise KeyError("no such note")

def ending(env):
    input()

def hanging(env):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["TMPDIR"], "child").write_text(str(child.pid))
    time.sleep(600)

def large(env):
    return len(bytearray(2**30))

def needy(env, threshold):
    return threshold

def nothing():
    return 1

constant = 1
"""
TYPED = """
from flotilla_env_gateway.plugins import Environment, ToolError, normalized_contains

def graded(env: Environment) -> float:
    assert type(env) is Environment
    try:
        env.call_tool("no_such_tool")
    except ToolError:
        return float(normalized_contains("milk", env.call_tool("list_notes")))
    return 0.5
"""
STANDARD = """
import json

async def awaited(env, final_answer=None):
    return final_answer == json.loads('"done"')

def first(env):
    return 0

def graded(env):
    return "milk" in str(env.call_tool("list_notes"))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "office"
    package.mkdir()
    (package / "__init__.py").write_text("print('on import')\n")
    (package / "words.py").write_text("WORD = 'milk'\n")
    (package / "rewards.py").write_text(PACKAGE)
    (tmp_path / "standard.py").write_text(STANDARD)
    return tmp_path


def settings(verifier: str, *trusted: str, **changes: Any) -> EnvGatewayConfig:
    command = environment_command("-m", "tests.support.mcp_stdio_server")
    server = {"transport": "stdio", "command": command, "shared_state": True}
    return EnvGatewayConfig.model_validate(
        {
            "backend": "mcp",
            "servers": [server],
            "environments": {"notes": {"verifier": verifier}},
            "verifiers": {"attempts": 1, "trusted": trusted, **changes},
        }
    )


@asynccontextmanager
async def gateway(config: EnvGatewayConfig) -> AsyncGenerator[Gateway]:
    from tests.support.grading_gateway import grading_gateway

    server: McpServer = config.servers[0]
    async with grading_gateway({"mcp": McpStdioBackend(server)}, config) as running:
        yield running


async def graded(
    config: EnvGatewayConfig, *calls: str, answer: str | None = None, seconds: float = 30.0
) -> Grade:
    async with gateway(config) as running:
        task = task_json(env_id="notes", verifier_func=None)
        session = await opened(running, open_spec(task=task))
        for number, text in enumerate(calls):
            await running.call_tool(session, number, "add_note", f'{{"text": "{text}"}}', 20.0)
        return await running.grade_episode(session, answer, None, seconds)


async def test_a_function_of_a_trusted_package_grades_with_what_it_imports(folder: Path) -> None:
    config = settings(f"{folder}/office.rewards:graded", "office")
    grade = await graded(config, "eggs", "milk")
    assert grade.reward == 1, grade
    assert grade.named_rewards["length"] > 0
    assert "milk" in grade.stdout
    assert (await graded(config, "eggs")).reward == 0


async def test_a_trusted_function_has_the_types_of_env_and_fleets_helpers(folder: Path) -> None:
    (folder / "office/typed.py").write_text(TYPED)
    config = settings(f"{folder}/office.typed:graded", "office")
    assert (await graded(config, "Milk!")).reward == 1
    assert (await graded(config, "eggs")).reward == 0


async def test_an_async_function_is_awaited_and_gets_the_final_answer(folder: Path) -> None:
    config = settings(f"{folder}/office.rewards:awaited", "office.rewards")
    assert (await graded(config, answer="done")).reward == 1
    assert (await graded(config, answer="no")).reward == 0


async def test_a_trusted_function_may_use_threads_sockets_and_programs_but_no_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef")
    grade = await graded(settings(f"{folder}/office.rewards:strong", "office"))
    assert grade.reward == 1, grade
    assert (await graded(settings(f"{folder}/office.rewards:secret", "office"))).reward == 0


@pytest.mark.parametrize(
    ("function", "detail"),
    [
        ("raising", r"KeyError: 'no such note' \(rewards\.py, line 27\)"),
        ("ending", r"EOFError: .*\(rewards\.py, line 30\)"),
        ("large", r"MemoryError"),
    ],
)
async def test_what_a_function_raises_is_no_grade_and_names_the_line(
    folder: Path, function: str, detail: str
) -> None:
    grade = await graded(settings(f"{folder}/office.rewards:{function}", "office"))
    assert grade.reason is NoGradeReason.EXECUTION_FAILED
    assert re.search(detail, grade.detail), grade.detail
    assert grade.verifier_fault


async def test_a_function_that_does_not_end_is_killed_with_what_it_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))
    config = settings(f"{folder}/office.rewards:hanging", "office", timeout_s=2.0)
    grade = await graded(config)
    assert grade.reason is NoGradeReason.TIMEOUT
    child = Path(f"/proc/{(folder / 'child').read_text()}/cmdline")
    await until(lambda: not child.exists() or not child.read_bytes(), 10.0)


@needs_sandbox
async def test_a_function_of_the_standard_library_runs_in_the_sandbox(folder: Path) -> None:
    """It is the one that is named, although another stands before it."""
    config = settings(f"{folder}/standard:graded")
    [named] = (await load_functions(config)).values()
    assert named.module is None and not named.function.packages
    assert (await graded(config, "milk")).reward == 1
    assert (await graded(config)).reward == 0
    assert (await graded(settings(f"{folder}/standard:awaited"), answer="done")).reward == 1


@pytest.mark.parametrize(
    ("verifier", "trusted", "problem"),
    [
        ("office.rewards:graded", (), r"imports \.words, numpy.*trusted = \[\"office\"\]"),
        ("office.rewards:absent", ("office",), "has no function 'absent'"),
        ("office.rewards:constant", ("office",), "has no function 'constant'"),
        ("office.rewards:needy", ("office",), "needs threshold, but gets env"),
        ("office.rewards:nothing", ("office",), "takes no `env`"),
        ("office.broken:graded", ("office",), r"NameError: .*'nme'.* \(broken\.py, line 2\)"),
        (
            "office.dated:graded",
            ("office",),
            r"No module named 'services.*' \(dated\.py, line 1\): from services\.common\.rpc.*;"
            r" services\.common\.rpc\.rpc is flotilla_common\.rpc\.rpc now",
        ),
        ("office.leaving:graded", ("office",), "SystemExit: 3"),
        ("office.ending:graded", ("office",), "ends the process"),
        ("absent_one:graded", ("absent_one",), "No module named 'absent_one'.*FOLDER/absent_one"),
        ("absent_one:graded", (), "there is no module 'absent_one' in .*FOLDER/absent_one"),
        ("office.absent:graded", (), "there is no module 'office.absent'"),
        ("flotilla.common.v1:redact", (), "'flotilla' is a package of Flotilla"),
        ("standard.py:absent", (), "defines no function 'absent'.*: awaited, first, graded"),
        ("unreadable:graded", (), "does not compile: .* in line 1: def"),
    ],
)
async def test_a_function_that_cannot_grade_is_refused_by_its_key_before_anything_starts(
    folder: Path, verifier: str, trusted: tuple[str, ...], problem: str
) -> None:
    (folder / "office/broken.py").write_text("def graded(env): ...\nnme\n")
    (folder / "office/dated.py").write_text("from services.common.rpc.rpc import channel\n")
    (folder / "office/leaving.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "office/ending.py").write_text("import os\nos._exit(0)\n")
    (folder / "unreadable.py").write_text("def graded(env:\n")
    with pytest.raises(ConfigError, match=r"environments\.notes\.verifier: .*" + problem):
        await load_functions(settings(f"{folder}/{verifier}", *trusted))


async def identity(config: EnvGatewayConfig) -> tuple[NamedVerifier, object]:
    """The verifier, and what a recording says of it."""
    functions = await load_functions(config)
    runner = VerifierRunner(config.verifiers, FakeGrader(), frozenset(), functions=functions)
    task = open_spec(task=task_json(env_id="notes", verifier_func=None)).task
    submission = Submission(task=task, run_id="run", final_answer="", conversation=None)
    recorded = identify_grade(runner.add_environment_verifier(submission))
    return functions["notes"], recorded["verifier"]


async def test_recordings_know_a_function_by_the_sources_of_its_package(folder: Path) -> None:
    config = settings(f"{folder}/office.rewards:graded", "office")
    named, before = await identity(config)
    assert (await identity(config))[1] == before
    assert re.fullmatch(
        r"from office\.rewards import graded  # SHA-256 [0-9a-f]{64}\n", named.source
    )
    (folder / "office/words.py").write_text("WORD = 'eggs'\n")
    assert (await identity(config))[1] != before


async def test_a_function_of_an_installed_package_is_known_by_its_version_as_well() -> None:
    config = settings("structlog:get_logger", "structlog")
    [named] = (await load_functions(config)).values()
    assert f"# structlog {metadata.version('structlog')}, SHA-256 " in named.source


async def test_sources_that_changed_since_the_start_grade_nothing(folder: Path) -> None:
    config = settings(f"{folder}/office.rewards:graded", "office")
    [named] = (await load_functions(config)).values()
    assert named.module is not None
    (folder / "office/words.py").write_text("WORD = 'eggs'\n")
    pool = VerifierPool(size=1, memory_bytes=2**29, modules=[named.module])
    before = psutil.Process().children(recursive=True)
    with pytest.raises(StartError, match=r"office\.rewards have changed since the gateway started"):
        await pool.start_workers()
    # Those that needed none of the sources had started.
    assert psutil.Process().children(recursive=True) == before


async def test_imports_that_may_fail_or_are_for_type_checkers_are_no_reason_to_refuse(
    folder: Path,
) -> None:
    (folder / "careful.py").write_text(
        "from typing import TYPE_CHECKING\nfrom fleet import verifier\nif TYPE_CHECKING:\n"
        "    import numpy\ntry:\n    import torch\nexcept ImportError:\n    torch = None\n"
        "def graded(env): ...\n"
    )
    assert await load_functions(settings(f"{folder}/careful:graded"))


def test_what_is_neither_a_file_nor_a_function_is_told_how_functions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"rewards:Rewards\.graded: .* MODULE:FUNCTION"):
        load_verifiers(settings("rewards:Rewards.graded"))


def test_a_trusted_name_that_no_verifier_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no environment's verifier is a function of 'offic'"):
        settings("office.rewards:graded", "offic")
    with pytest.raises(ValueError, match=r"function of 'office\.rewards'.*: none"):
        settings("rewards.py", "office.rewards")


@pytest.mark.parametrize(
    ("backend", "fix"),
    [
        ({"fleet": {"verify": "remote"}}, r'fleet\.verify = "local"'),
        ({"openenv": {"url": "http://127.0.0.1:1"}}, r'openenv\.reward = "verifier"'),
    ],
)
def test_a_function_that_never_runs_is_refused(backend: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=rf"rewards:graded never runs, .* use .*{fix}"):
        EnvGatewayConfig.model_validate(
            {
                "backend": next(iter(backend)),
                "backends": backend,
                "environments": {"notes": {"verifier": "rewards:graded"}},
            }
        )
