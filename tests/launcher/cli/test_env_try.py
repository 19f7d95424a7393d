"""`flotilla env try`: the command itself, with a gateway and an environment that are real."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from flotilla_launcher.cli.env_try import _show_ready  # pyright: ignore[reportPrivateUsage]
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.doctor.adapters.gateway_process import GatewayError, serve_gateway
from tests.support.launcher import forged_command
from tests.support.repository import ROOT

SPEC = ROOT / "deploy/runs/local.toml"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    made = [make_task("booking", "train", index) for index in range(2)]
    path.write_text(json.dumps({"tasks": made}))
    return path


def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    words = ("-m", "flotilla_launcher.cli.app", "env", "try", *map(str, arguments))
    return subprocess.run(
        forged_command(*words),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )


def test_calls_from_standard_input_are_made_in_order_and_graded(tasks: Path) -> None:
    task = make_task("booking", "train", 1)
    calls = [f"{name} {json.dumps(arguments)}" for name, arguments in plan_calls(task)]
    done = run(
        *(SPEC, tasks, "--key", task["key"], "--answer", "done", "--env_gateway.backend=embedded"),
        stdin="\n".join(calls),
    )
    assert done.returncode == 0, done.stderr
    assert f"prompt   {task['prompt']}" in done.stdout
    assert done.stdout.count(": ok") == len(calls)
    assert "reward   1\n" in done.stdout


def test_text_without_a_call_is_named_and_an_untouched_task_earns_nothing(tasks: Path) -> None:
    done = run(SPEC, tasks, "--env_gateway.backend=embedded", stdin="what is this?\nfly {}\n")
    assert "not a call: what is this?" in done.stdout
    assert "fly: bad_tool" in done.stdout
    assert "reward   0\n" in done.stdout


def test_a_person_may_think_for_longer_than_the_lease_and_needs_no_policy(
    tasks: Path, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[env_gateway]\nbackend = "embedded"\nlease_ttl_s = 1.0\n')
    command = forged_command("-m", "flotilla_launcher.cli.app", "env", "try", str(spec), str(tasks))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("prompt"):
                break
        time.sleep(1.5)
        process.stdin.write('find_bookings {"guest": "Nobody", "city": "Nowhere"}\n')
        process.stdin.close()
        shown = process.stdout.read()
    assert ("find_bookings: tool_error" in shown, "reward   0\n" in shown) == (True, True), shown


def test_tools_with_odd_schemas_and_line_ends_in_their_names_take_one_line_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ready = pb.EpisodeReady()
    for name, schema in (("a\nreward   1", "true"), ("b\x1b[2J", '{"properties": ["x"]}')):
        ready.tools.add(name=name, input_schema_json=schema, description="x\ny")
    _show_ready(ready, Terminal(soft_wrap=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["tool     a␊reward   1()  x", "tool     b␛[2J()  x"]


def test_an_answer_that_replaces_a_submitted_one_is_announced(tmp_path: Path) -> None:
    words = (*lenient_task(tmp_path, passes_untouched=False), "--answer", "done")
    path = Path(words[1])
    (task,) = json.loads(path.read_text())
    task["prompt"] += " End with submit_final_answer."
    path.write_text(json.dumps([task]))
    done = run(*words, stdin='submit_final_answer {"answer": "other"}\n')
    assert "warning  --answer replaces the answer of submit_final_answer" in done.stdout, (
        done.stdout
    )


def test_a_task_that_passes_though_nothing_was_done_is_suspect(tmp_path: Path) -> None:
    done = run(*lenient_task(tmp_path, passes_untouched=False))
    assert (done.returncode, "reward   1\n" in done.stdout) == (0, True), done.stderr
    assert "suspect  the task passes though nothing was done" in done.stdout
    answered = run(*lenient_task(tmp_path, passes_untouched=False), "--answer", "done")
    right = run(*lenient_task(tmp_path, passes_untouched=True))
    for each in (answered, right):
        assert ("reward   1\n" in each.stdout, "suspect" in each.stdout) == (True, False)


def lenient_task(folder: Path, *, passes_untouched: bool) -> tuple[str | Path, ...]:
    """The words that try a task whose verifier accepts everything."""
    verifier = "def passed(env, final_answer=None):\n    return 1\n"
    (folder / "passed.sha256").write_text(f"{sha256(verifier.encode()).hexdigest()}  passed\n")
    task = {**make_task("booking", "train", 0), "verifier_func": verifier}
    path = folder / "tasks.json"
    path.write_text(json.dumps([{**task, "passes_untouched": passes_untouched}]))
    digests = f"--env_gateway.verifiers.digests={folder}/passed.sha256"
    return (SPEC, path, "--env_gateway.backend=embedded", digests)


def test_a_task_that_is_not_there_is_named(tasks: Path) -> None:
    done = run(SPEC, tasks, "--key", "missing")
    assert (done.returncode, "none of its 2 tasks has the key 'missing'" in done.stdout) == (
        1,
        True,
    )


def test_a_spec_that_is_wrong_is_shown_with_what_is_wrong(tasks: Path) -> None:
    done = run(SPEC, tasks, "--env_gateway.backend=teleport")
    assert done.returncode == 1
    assert "the gateway ended without serving" in done.stdout
    assert "backend: " in done.stdout and "'embedded'" in done.stdout


async def test_a_gateway_that_ends_silently_is_reported_with_its_code_in_one_line() -> None:
    command = (sys.executable, "-c", "raise SystemExit(7)")
    with pytest.raises(GatewayError, match="with code 7: it printed nothing"):
        async with serve_gateway(SPEC, (), print, command=command):
            pass


def test_a_standard_input_that_is_closed_is_an_empty_one(tasks: Path) -> None:
    command = f"{sys.executable} -m flotilla_launcher.cli.app env try {SPEC} {tasks}"
    done = subprocess.run(
        ["sh", "-c", f"{command} --env_gateway.backend=embedded <&-"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "reward   0\n" in done.stdout) == (0, True), done.stderr


def test_a_server_that_is_stopped_is_named_within_seconds_with_the_fix(tmp_path: Path) -> None:
    task = {"key": "price-potato", "prompt": "Find potato.", "env_id": "stock"}
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([task]))
    began = time.monotonic()
    done = run(
        *(SPEC, path, "--env_gateway.servers=[{url = 'http://127.0.0.1:9/mcp'}]"),
    )
    assert time.monotonic() - began < 40, "on a machine that does much else"
    assert done.returncode == 1
    message = "http://127.0.0.1:9/mcp cannot be reached: Connection refused"
    assert "starting a gateway" in done.stdout
    assert f"warming: connect: {message}, trying again" in done.stdout
    assert f"cannot open the environment: connect: {message}; start the server" in done.stdout
    assert "or correct env_gateway.servers.0.url" in done.stdout


def test_a_fix_names_the_server_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    task = {"key": "a", "prompt": "A", "env_id": "two", "servers": ["one", "away"]}
    path.write_text(json.dumps([task]))
    one = 'name = "one", url = "http://127.0.0.1:9/mcp"'
    away = 'name = "away", command = ["true"], transport = "stdio"'
    servers = f"--env_gateway.servers=[{{{one}}}, {{{away}}}]"
    done = run(SPEC, path, servers)
    assert (done.returncode, "server away: lost: " in done.stdout) == (1, True), done.stdout
    assert "correct env_gateway.servers.1, or the task" in done.stdout


def running(folder: Path) -> list[str]:
    """Gateways whose run folder is in `folder`."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if f"--run-dir {folder}" in line]


def scratch_folders_left(folder: Path) -> list[Path]:
    return list(folder.glob("flotilla-scratch-*"))


# Like a shell's background command. (With `preexec_fn` gRPC's threads may break the child before
# exec.)
DEAF_TO_CTRL_C = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_a_signal_while_a_terminal_is_waited_for_ends_it_and_its_gateway(
    tasks: Path, tmp_path: Path, end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    typing, terminal = pty.openpty()
    words = ("env", "try", str(SPEC), str(tasks), "--env_gateway.backend=embedded")
    command = (sys.executable, "-m", "flotilla_launcher.cli.app", *words)
    process = subprocess.Popen(
        [*DEAF_TO_CTRL_C, *command],
        stdin=terminal,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        message = b""
        deadline = time.monotonic() + 30
        while b"Ctrl-D ends" not in message and time.monotonic() < deadline:
            if select.select([process.stdout], [], [], 1.0)[0]:
                message += os.read(process.stdout.fileno(), 4096)
        assert running(tmp_path)
        process.send_signal(end)
        killed = end is signal.SIGKILL
        assert process.wait(timeout=20) == (-end if killed else 130)
        # A killed command waits for nothing: its gateway ends alone.
        while killed and running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(tmp_path)
        # The next command that needs a folder removes that of a killed one, once the kernel has
        # closed the gateway's files: `ps` misses a process some time before that.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        while killed and scratch_folders_left(tmp_path) and time.monotonic() < deadline:
            with scratch_folder():
                pass
            time.sleep(0.05)
        assert not scratch_folders_left(tmp_path)
    finally:
        process.kill()
        process.stdout.close()
        os.close(typing)
        os.close(terminal)


def test_a_long_answer_is_shown_whole(tmp_path: Path) -> None:
    lines = [
        "import json, sys",
        "info = {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}},",
        "        'serverInfo': {'name': 's', 'version': '1'}}",
        "tools = {'tools': [{'name': 'read', 'inputSchema': {'type': 'object'}}]}",
        "text = {'content': [{'type': 'text', 'text': 'x' * 300_000 + 'end'}]}",
        "results = {'initialize': info, 'tools/list': tools, 'tools/call': text}",
        "for line in sys.stdin:",
        "    asked = json.loads(line)",
        "    if 'id' in asked:",
        "        result = results.get(asked['method'], {})",
        "        print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], 'result': result}),",
        "              flush=True)",
    ]
    (tmp_path / "server.py").write_text("\n".join(lines))
    server = {"transport": "stdio", "command": [sys.executable, str(tmp_path / "server.py")]}
    spec = {"env_gateway": {"backend": "mcp", "servers": [server]}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    (tmp_path / "tasks.json").write_text('[{"key": "t", "prompt": "p", "env_id": "s"}]')
    done = run(tmp_path / "spec.json", tmp_path / "tasks.json", stdin="read\n")
    assert "read: ok " + "x" * 300_000 + "end\n" in done.stdout, done.stdout[-500:] + done.stderr
