"""Whatever an environment, a task or a policy writes, no command of `flotilla` lets it control the
terminal that it is shown on."""

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table
from rich.text import Text

from flotilla.env_gateway.v1 import episode_service_pb2 as gateway_pb
from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.cli import doctor, env_status, env_try, show
from flotilla_launcher.cli.adapters import play_gateway
from flotilla_launcher.cli.attempt_text import draw_attempt
from flotilla_launcher.cli.command_runner import report_error
from flotilla_launcher.cli.log_lines import LogPrinter
from flotilla_launcher.cli.progress_view import LiveView, PlainView, open_view
from flotilla_launcher.cli.run_view import RunBoard
from flotilla_launcher.cli.status_json import format_status_json
from flotilla_launcher.cli.status_text import make_runs_table, print_run, print_table
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.doctor.adapters import trial_episode
from flotilla_launcher.doctor.findings import Finding, ProbeResult, Status
from flotilla_launcher.run_spec import BadSpecError
from tests.support.hostile_text import HOSTILE, SURROGATES, assert_harmless
from tests.support.repository import ROOT

ALARM = alarm_pb.Alarm(
    rule=HOSTILE,
    scope=HOSTILE,
    severity=alarm_pb.ALARM_SEVERITY_ERROR,
    cause=HOSTILE,
    fix=HOSTILE,
)
RUN = pb.Run(
    run_id=HOSTILE,
    state=pb.RUN_STATE_RUNNING,
    error=HOSTILE,
    unreachable=HOSTILE,
    create_time=Timestamp(seconds=1_700_000_000),
    directory=HOSTILE,
    backend=HOSTILE,
    cleanup_detail=HOSTILE,
    cleanup=pb.CLEANUP_LEAK_SUSPECTED,
    metrics={HOSTILE: 1.0},
    replicas=[pb.ServiceReplica(service=HOSTILE, state=HOSTILE, phase=HOSTILE, address=HOSTILE)],
    alarms=[ALARM],
)
ATTEMPT: dict[str, Any] = {
    **dict.fromkeys(
        (
            "group_id",
            "task_key",
            "task_prompt",
            "no_grade",
            "detail",
            "dropped",
            "worker_id",
            "suspicion",
        ),
        SURROGATES,
    ),
    **{"reward": None, "partial_reward": None, "failure": SURROGATES, "stop_reason": None},
    **{"eval_id": SURROGATES, "step": 1, "try": 0, "attempt_index": 0, "tokens_kept": True},
    "counts": {
        **dict.fromkeys(("turns", "tool_calls", "parse_errors", "repeats"), 1),
        **{"open_s": 0.0, "grade_s": 0.0, "tool_errors": {SURROGATES: 1}},
    },
    "sequences": [[{"author": "environment", "token_ids": [1]}]],
    "messages": [[{"role": "tool", "end": 1, "content": [0, 1], "outcome": SURROGATES}]],
    "named_rewards": {SURROGATES: 0.5},
    "judged": False,
    "turns": [],
    "checks_passed": [SURROGATES],
    "checks_failed": [SURROGATES],
}


def terminal(*, styled: bool = False, width: int = 100) -> Terminal:
    return Terminal(file=io.StringIO(), force_terminal=styled, width=width)


def written(console: Terminal) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("styled", [False, True])
@pytest.mark.parametrize(
    "shown",
    [SURROGATES, Text(SURROGATES, style="red"), draw_attempt(ATTEMPT, lambda _ids: SURROGATES)],
    ids=["a text", "a styled text", "show"],
)
def test_a_terminal_shows_what_it_is_given(shown: Any, styled: bool) -> None:
    console = terminal(styled=styled)
    console.print(shown, soft_wrap=True)
    assert_harmless(written(console), styled=styled)


def test_a_table_of_hostile_cells_keeps_its_columns() -> None:
    console = terminal(width=400)
    table = Table(title=SURROGATES, caption=SURROGATES)
    table.add_column(SURROGATES)
    table.add_column("next")
    table.add_row(SURROGATES, "mine")
    table.add_row("x", "mine")
    console.print(table)
    assert_harmless(written(console))
    rows = [line for line in written(console).splitlines() if "mine" in line]
    assert len({row.index("mine") for row in rows}) == 1


@pytest.mark.parametrize("styled", [False, True])
def test_status(styled: bool) -> None:
    console = terminal(styled=styled)
    print_table(make_runs_table([RUN]), console)
    assert_harmless(written(console), styled=styled)
    print_run(RUN, lambda place: place, console, alone=True)
    assert_harmless(written(console), styled=styled)


def test_status_for_programs_is_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    reported = json.loads(format_status_json([RUN], attended=True))
    assert reported["runs"][0]["run_id"] == HOSTILE


def board() -> RunBoard:
    board = RunBoard(alarms={HOSTILE: ALARM}, replicas={HOSTILE: HOSTILE}, phase=HOSTILE)
    board.total_steps = 1
    board.metrics["reward/" + HOSTILE] = 1.0
    return board


def test_the_board_and_its_lines_on_a_terminal_and_in_a_pipe() -> None:
    for styled in (False, True):
        console = terminal(styled=styled)
        with open_view(console) as view:
            assert isinstance(view, LiveView if styled else PlainView)
            view.show_line(HOSTILE)
            view.show_board(board())
        assert_harmless(written(console), styled=styled)


def test_logs_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": SURROGATES, "level": "error", "why": SURROGATES, "exception": SURROGATES}
    forged = {"event": "called\n12:00:00 error   forged", "level": "info"}
    lines = [json.dumps(event), SURROGATES, json.dumps(forged)]
    console = terminal()
    printer = LogPrinter(as_json=False)
    printer._console = console  # pyright: ignore[reportPrivateUsage]
    printer._as_json = False  # pyright: ignore[reportPrivateUsage]
    for line in lines:
        printer.print_line("rollout-0", line)
    assert_harmless(written(console))
    assert "\n12:00:00" not in written(console)
    for line in lines:
        LogPrinter(as_json=True).print_line("rollout-0", line)
    printed = capsys.readouterr().out
    assert_harmless(printed)
    assert json.loads(printed.splitlines()[0]) == {"source": "rollout-0", **event}
    assert json.loads(printed.splitlines()[1])["event"] == SURROGATES
    # A line cannot claim to come from another log.
    LogPrinter(as_json=True).print_line("rollout-0", '{"event": "x", "source": "learner-0"}')
    assert json.loads(capsys.readouterr().out)["source"] == "rollout-0"


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = [ProbeResult(HOSTILE, (Finding(Status.FAIL, SURROGATES),))]

    def wrong(*_: object) -> object:
        raise BadSpecError(SURROGATES)

    doctor._print_results(results)  # pyright: ignore[reportPrivateUsage]
    assert "0;owned" in capsys.readouterr().out.replace("\n", "")
    monkeypatch.setattr(doctor, "load_spec", wrong)
    for as_json in (False, True):
        assert doctor.run_doctor(Path("x"), Path("y"), (), (), as_json=as_json) == 1
        printed = capsys.readouterr().out
        assert_harmless(printed if as_json else "".join(printed.split("\n")))
    assert json.loads(printed)[0]["detail"].startswith(SURROGATES)


def test_env_status_and_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    one = gateway_pb.EnvironmentStatus(env_key=HOSTILE, backend=HOSTILE, no_grades=1, grades=1)
    one.no_grade_reasons[HOSTILE] = 1
    limiter = gateway_pb.LimiterStatus(name=HOSTILE, of=HOSTILE)
    answer = gateway_pb.GetStatusResponse(phase=HOSTILE, environments=[one], limiters=[limiter])
    console = terminal(width=2000)
    env_status._print_status(  # pyright: ignore[reportPrivateUsage]
        env_status.GatewayTarget(HOSTILE, HOSTILE, ""), answer, console
    )
    assert_harmless(written(console))
    assert report_error(SURROGATES) == 1
    assert_harmless(capsys.readouterr().out)


async def test_env_try(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    part = gateway_pb.ContentPart(text=HOSTILE)
    ready = gateway_pb.EpisodeReady(
        instance_id=HOSTILE,
        facts=gateway_pb.PromptFacts(prompt=HOSTILE),
        initial_observation=[part],
        tools=[
            gateway_pb.Tool(
                name=HOSTILE,
                description=HOSTILE.replace("\r", ""),
                input_schema_json=json.dumps({"properties": {HOSTILE: {}}}),
            )
        ],
    )
    grade = gateway_pb.GradeResponse(checks_passed=[HOSTILE], checks_failed=[HOSTILE])
    grade.no_grade.detail = HOSTILE

    async def answered(_request: object, **_: object) -> Any:
        return gateway_pb.CallToolResponse(outcome=gateway_pb.TOOL_OUTCOME_OK, parts=[part])

    async def graded(_requests: object, **_: object) -> Any:
        return grade

    lines = asyncio.StreamReader()
    lines.feed_data(f"look\n{HOSTILE}\n".encode())
    lines.feed_eof()
    monkeypatch.setattr(env_try, "open_standard_input", lambda: lines)
    stub, console = SimpleNamespace(CallTool=answered, Grade=graded), terminal()
    env_try._show_ready(ready, console)  # pyright: ignore[reportPrivateUsage]
    opened = gateway_pb.OpenEpisodeResponse(episode_id="e", ready=ready)
    calling = env_try._make_calls(stub, opened, None, console)  # pyright: ignore[reportPrivateUsage]
    messages = await calling
    header = gateway_pb.GradeHeader(episode_id="e")
    found = await trial_episode.grade_episode(stub, header, messages, 1.0, ready)
    env_try._show_grade(found, console)  # pyright: ignore[reportPrivateUsage]
    assert_harmless(written(console))
    assert written(console).count("0;owned") >= 8
    play_gateway._show_warning(HOSTILE)  # pyright: ignore[reportPrivateUsage]
    assert_harmless(capsys.readouterr().err)


def test_show_of_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader passes hostile text of a journal on, and it is shown as text."""
    monkeypatch.setattr(show, "query_attempts", lambda *_: iter([ATTEMPT, {"matched": 1}]))
    monkeypatch.setattr(show, "_load_run_decoder", lambda *_: lambda _ids: SURROGATES)
    monkeypatch.setattr(show, "find_run_dir", lambda *_: tmp_path)
    assert show.show_attempts("r", tmp_path, show.AttemptFilter(), 3, None) == 0
    assert_harmless(capsys.readouterr().out)


SERVER = """
import json, sys
hostile = json.loads(sys.argv[1])
print(hostile, file=sys.stderr, flush=True)
tool = {"name": "look", "description": hostile, "inputSchema": {"type": "object"}}
answers = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "serverInfo": {"name": hostile, "version": hostile},
    },
    "tools/list": {"tools": [tool]},
    "tools/call": {"content": [{"type": "text", "text": hostile}]},
}
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answers.get(request["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


@pytest.mark.slow
def test_env_try_with_a_server_that_is_hostile_everywhere(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, str(tmp_path / "server.py"), json.dumps(HOSTILE)]
    spec = {
        "name": "hostile",
        "policy": {"model": str(tmp_path), "max_model_len": 512},
        "env_gateway": {
            "backend": "mcp",
            "servers": [{"transport": "stdio", "command": command}],
        },
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    task = {"key": "t", "prompt": HOSTILE, "env_id": "x"}
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    program = (sys.executable, "-m", "flotilla_launcher.cli.app", "env", "try")
    done = subprocess.run(
        [*program, str(tmp_path / "spec.json"), str(tmp_path / "tasks.json")],
        input=b"look\n",
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    output = done.stdout.decode()
    assert_harmless(output)
    assert output.count("0;owned") == 3, output + done.stderr.decode()
    assert_harmless(done.stderr.decode())
