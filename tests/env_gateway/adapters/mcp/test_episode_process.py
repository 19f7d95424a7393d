"""A server's process in a folder of its own, by both ways of ending processes."""

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.adapters.mcp.episode_process import EpisodeProcesses, EpisodeServers
from flotilla_env_gateway.config.backends import McpServer
from tests.env_gateway.adapters.process_modes import MODES, use_mode
from tests.support.marked_processes import Mark
from tests.support.repository import ROOT
from tests.support.started_process import start_beside
from tests.support.waiting import until

_GATEWAY = """
import asyncio, sys
from flotilla_env_gateway.adapters import process_namespace
from flotilla_env_gateway.adapters.mcp.episode_process import EpisodeServers
from flotilla_env_gateway.config.backends import McpServer

if sys.argv[1] == "reaper":
    process_namespace.find_bubblewrap = lambda: None

async def main():
    script = "while true; do echo x >> file; mkdir -p new; done & echo $PWD; cat"
    servers = EpisodeServers([McpServer(transport="stdio", command=("sh", "-c", script))])
    processes = await servers.start_processes({})
    print((await processes.children[0].stdout.readline()).decode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_mode(request.param, monkeypatch)
    return request.param


@asynccontextmanager
async def processes(
    script: str, *arguments: str, **config: object
) -> AsyncGenerator[EpisodeServers]:
    """Processes of a shell script."""
    command = ("sh", "-c", script, "sh", *arguments)
    server = McpServer.model_validate({"transport": "stdio", "command": command, **config})
    made = EpisodeServers([server])
    try:
        yield made
    finally:
        await made.close()


async def read_all(process: EpisodeProcesses) -> str:
    """Return what a process writes until it ends, and close it."""
    output = (await process.children[0].stdout.read()).decode()
    await process.close()
    return output


async def run_script(script: str, *arguments: str, **config: object) -> str:
    async with processes(script, *arguments, **config) as made:
        return await read_all(await made.start_processes({}))


def folders_of(temporary: Path) -> list[str]:
    """Return the folders of episodes that exist."""
    return [path.name for path in temporary.glob("flotilla-episodes-*/*")]


@pytest.mark.usefixtures("mode")
async def test_an_episode_begins_with_the_template_and_not_with_what_others_wrote(
    tmp_path: Path, temporary: Path
) -> None:
    template = tmp_path / "template"
    (template / "inner").mkdir(parents=True)
    (template / "inner/note").write_text("hello")
    (template / "inner/note").chmod(0o640)
    (template / "link").symlink_to("inner/note")
    script = (
        "find . | sort | tr '\\n' ' '; stat -c %a inner/note; cat link; echo bye > link; touch new"
    )
    async with processes(script, template=template) as made:
        for _ in range(2):
            assert await read_all(await made.start_processes({})) == (
                ". ./inner ./inner/note ./link 640\nhello"
            )
            assert folders_of(temporary) == []
    assert (template / "inner/note").read_text() == "hello"
    assert os.listdir(temporary) == []


@pytest.mark.usefixtures("mode")
async def test_the_folder_is_named_in_arguments_and_variables(temporary: Path) -> None:
    script = 'pwd; echo "$1"; echo "$2"; echo "$PLACE"; echo "$TMPDIR"'
    braces = '{"a": {episode_dir}, "b": "{other}"}'
    output = await run_script(script, "{episode_dir}/x", braces, env={"PLACE": "at {episode_dir}"})
    there, first, second, place, tmp = output.splitlines()
    assert Path(there).is_relative_to(temporary)
    assert first == f"{there}/x"
    assert second == f'{{"a": {there}, "b": "{{other}}"}}'
    assert place == f"at {there}"
    assert Path(tmp).parent == Path(there).parent and tmp != there


async def test_a_mounted_folder_has_the_same_name_in_each_episode_and_no_neighbours(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_mode("namespace", monkeypatch)
    async with processes("pwd; echo mine > ../tmp/x; ls ..; ls ../tmp; cat") as made:
        one, two = [await made.start_processes({}) for _ in range(2)]
        assert len(folders_of(temporary)) == 2
        one.children[0].stdin.close()
        two.children[0].stdin.close()
        seen = [await read_all(process) for process in (one, two)]
    assert seen[0] == seen[1]
    assert seen[0].splitlines()[1:] == ["files", "tmp", "x"]


async def test_tmp_is_the_episodes_own_unless_its_server_gets_something_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_mode("namespace", monkeypatch)
    if any(path.startswith("/tmp/") for path in (str(ROOT), sys.executable)):
        pytest.skip("the repository is in /tmp")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    for name in [name for name, value in os.environ.items() if "/tmp/" in value]:
        monkeypatch.delenv(name)
    with tempfile.NamedTemporaryFile(prefix="flotilla-test-") as file:
        name = file.name.removeprefix("/tmp/")
        script = f"cd /tmp; ls; touch {name}-new $TMPDIR/y"
        assert name not in await run_script(script)
        assert f"{name}-new" not in os.listdir("/tmp")
        assert name in await run_script("ls /tmp", file.name)
        assert name in await run_script("ls /tmp", env={"FILE": file.name})


@pytest.mark.usefixtures("temporary")
async def test_a_script_of_our_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in (("serve.py", "ours"), ("data.db", "ours"), ("both.py", "ours")):
        (tmp_path / name).write_text(word)
    (tmp_path / "template").mkdir()
    (tmp_path / "template/both.py").write_text("the template's")
    monkeypatch.chdir(tmp_path)
    script = 'cat "$1"; echo; cat "$2"; echo; ls "$3" 2>/dev/null; echo "$4"'
    arguments = ("serve.py", "both.py", "data.db", "missing.py")
    output = await run_script(script, *arguments, template="template")
    assert output.splitlines() == ["ours", "the template's", "missing.py"]


@pytest.mark.usefixtures("mode")
async def test_shared_state_is_that_of_our_working_directory(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        output = await run_script("pwd; echo x >> notes; wc -l < notes", shared_state=True)
        assert output.split() == [str(tmp_path), str(number)]
    assert os.listdir(temporary) == []


@pytest.mark.usefixtures("mode")
async def test_a_folder_is_removed_whatever_its_server_has_made_of_it(temporary: Path) -> None:
    deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')"
    script = f"{shlex.join((sys.executable, '-c', deep))}; mkdir x; touch x/y; chmod 0 x . ..; pwd"
    await run_script(script)
    assert os.listdir(temporary) == []


@pytest.mark.usefixtures("mode")
async def test_a_start_that_fails_or_is_cancelled_leaves_no_folder(temporary: Path) -> None:
    mark = Mark()
    async with processes("cat", env={"BAD": "a\0b"}) as made:
        with pytest.raises(ValueError, match="null byte"):
            await made.start_processes({})
        assert folders_of(temporary) == []
    async with processes("cat") as made:
        for number in range(10):
            starting = asyncio.create_task(made.start_processes(mark.environment))
            await asyncio.sleep(0.005 * number)
            starting.cancel()
            await asyncio.wait({starting})
            if not starting.cancelled():
                await starting.result().close()
        await until(lambda: folders_of(temporary) == [])
        await mark.wait_for_none()


@pytest.mark.usefixtures("mode")
async def test_a_template_that_cannot_be_copied_is_told(tmp_path: Path, temporary: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    async with processes("cat", template=template) as made:
        template.rmdir()
        with pytest.raises(OSError, match="template"):
            await made.start_processes({})
        assert folders_of(temporary) == []


def test_a_template_that_is_missing_is_refused_at_the_start() -> None:
    server = McpServer(transport="stdio", command=("cat",), template=Path("no/such/folder"))
    with pytest.raises(ConfigError, match=r"server\.template: no/such/folder is not a folder"):
        EpisodeServers([server])


async def test_the_folders_of_a_gateway_that_is_killed_are_removed(
    mode: str, temporary: Path
) -> None:
    mark = Mark()
    gateway = await start_gateway(mode, temporary, mark)
    assert len(folders_of(temporary)) == 1
    gateway.kill()
    await gateway.wait()
    await mark.wait_for_none()
    await until(lambda: os.listdir(temporary) == [])


async def test_the_next_gateway_removes_what_nobody_could(temporary: Path) -> None:
    mark = Mark()
    gateway = await start_gateway("reaper", temporary, mark)
    removers = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] and process.info["cmdline"][-1].startswith(str(temporary))
    ]
    for pid in (*removers, gateway.pid):
        os.kill(pid, 9)
    await gateway.wait()
    await mark.wait_for_none()
    assert len(removers) == 1 and len(folders_of(temporary)) == 1
    async with processes("cat"):
        assert folders_of(temporary) == []


async def start_gateway(mode: str, temporary: Path, mark: Mark) -> asyncio.subprocess.Process:
    """Start a process with an episode whose server writes without a pause."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/gen", **mark.environment}
    environment["TMPDIR"] = str(temporary)
    gateway, line = await start_beside(python_command("-c", _GATEWAY, mode), env=environment)
    assert line.startswith(str(temporary))
    return gateway


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"command": ("x",), "template": "t"}, 'need transport "stdio"'),
        ({"url": "http://h", "shared_state": True}, 'need transport "stdio"'),
        (
            {"command": ("x",), "transport": "stdio", "template": "t", "shared_state": True},
            "no episode has a folder",
        ),
        ({"command": ("x", "{episode_dir}/y")}, r"\{episode_dir\} in command or env needs"),
        (
            {
                "command": ("x",),
                "transport": "stdio",
                "env": {"A": "{episode_dir}"},
                "shared_state": True,
            },
            "without shared_state",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, object], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        McpServer.model_validate(settings)
