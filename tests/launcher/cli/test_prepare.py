"""Commands that prepare a run on this machine, some of them hostile."""

import asyncio
import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.prepare import run_prepare_commands
from flotilla_launcher.cli.terminal import Terminal
from flotilla_launcher.control.prepare_commands import PrepareError
from flotilla_learner.sampling.tasks import load_tasks
from tests.reading.data.made_tasks import make_rows
from tests.support.launcher import spec


async def test_a_failed_preparation_shows_its_output(tmp_path: Path) -> None:
    table = {"creates": str(tmp_path / "x"), "command": ["python", "-c", "exit('no luck')"]}
    console = Terminal(file=io.StringIO())
    with pytest.raises(PrepareError, match="no luck"):
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
    table["command"] = ["true"]
    with pytest.raises(PrepareError, match="did not create"):
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)


async def test_a_preparation_runs_again_when_what_it_needs_is_newer(tmp_path: Path) -> None:
    source, made = tmp_path / "source.txt", tmp_path / "made.txt"
    program = f"open({str(made)!r}, 'a').write('x')"
    table = {"creates": str(made), "command": ["python", "-c", program], "needs": ["*.txt"]}
    console = Terminal(file=io.StringIO())
    source.write_text("1")
    with contextlib.chdir(tmp_path):
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        assert made.read_text() == "x"
        later = made.stat().st_mtime + 10
        os.utime(source, (later, later))
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=False)
        assert made.read_text() == "x", "a resumed run keeps its initial files"
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        assert made.read_text() == "xx"


async def test_a_folder_is_newer_with_any_file_in_it(tmp_path: Path) -> None:
    task, made = tmp_path / "tasks" / "one" / "task.toml", tmp_path / "made.txt"
    task.parent.mkdir(parents=True)
    task.touch()
    # As an editor leaves one beside an open file.
    (tmp_path / "tasks" / ".#task.toml").symlink_to("nobody@nowhere")
    program = f"open({str(made)!r}, 'a').write('x')"
    needs = ["tasks", "tasks/.*"]
    table = {"creates": str(made), "command": ["python", "-c", program], "needs": needs}
    console = Terminal(file=io.StringIO())
    with contextlib.chdir(tmp_path):
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        assert made.read_text() == "x"
        later = made.stat().st_mtime + 10
        os.utime(task, (later, later))
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        assert made.read_text() == "xx"


async def test_a_command_of_flotilla_makes_its_file_anew_for_newer_code_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "site" / "made_of_this" / "below" / "code.py"
    code.parent.mkdir(parents=True)
    code.touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    made = tmp_path / "tasks.json"
    words = ["flotilla", "tasks", "--split", "train", "--count", "2", "--out", str(made)]
    needs = ["package:made_of_this", "package:nowhere.at_all"]
    table = {"creates": str(made), "command": words, "needs": needs}
    console = Terminal(file=io.StringIO())
    for newer, count in ((0, 2), (-10, 0), (10, 2)):
        if newer:
            made.write_text('{"tasks": []}')
            changed = made.stat().st_mtime + newer
            os.utime(code, (changed, changed))
        await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
        assert len(json.loads(made.read_text())["tasks"]) == count


async def test_a_pattern_that_matches_no_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").touch()
    table = {"creates": "made", "command": ["true"], "needs": ["gone/*.py"]}
    with pytest.raises(PrepareError, match=r"'gone/\*\.py', which matches no file"):
        await run_prepare_commands(
            spec(prepare=[table]), Terminal(file=io.StringIO()), Interrupts(), refresh=True
        )


async def test_b55_a_preparation_is_no_line_of_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["$(touch harmful)", "`touch harmful`", "; touch harmful", "$HOME"]
    program = "import sys, pathlib; pathlib.Path('made').write_text('|'.join(sys.argv[1:]))"
    table = {"creates": "made", "command": ["python", "-c", program, *arguments]}
    await run_prepare_commands(
        spec(prepare=[table]), Terminal(file=io.StringIO()), Interrupts(), refresh=True
    )
    assert os.listdir(tmp_path) == ["made"]
    assert await asyncio.to_thread(Path("made").read_text) == "|".join(arguments)


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("terminal", [False, True])
async def test_a_preparation_shows_how_far_it_has_come(
    tmp_path: Path, width: int, *, terminal: bool
) -> None:
    made = tmp_path / "made"
    program = f"print('training 300 of 1,000', flush=True); open({str(made)!r}, 'w').close()"
    table = {"creates": str(made), "command": ["python", "-c", program], "message": "Building it"}
    output = io.StringIO()
    console = Terminal(file=output, force_terminal=terminal, width=width)
    await run_prepare_commands(spec(prepare=[table]), console, Interrupts(), refresh=True)
    text = output.getvalue()
    assert "Building it" in text and "training 300 of 1,000" in text


def write_tasks(**sizes: int) -> None:
    Path("tasks.json").write_text(json.dumps(make_rows(sizes)))


async def test_data_are_prepared_once_again_for_a_newer_source_and_apart_for_other_wishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tasks(shop=60)
    file = tmp_path / "spec.json"

    async def prepared(*overrides: str, refresh: bool = True) -> tuple[Path, int]:
        file.write_text(json.dumps(spec(data={"source": "tasks.json"})))
        loaded = load_spec(file, overrides)
        await run_prepare_commands(
            loaded, Terminal(file=io.StringIO()), Interrupts(), refresh=refresh
        )
        train = Path(loaded["learner"]["tasks"])
        return train.parent, len(load_tasks(train))

    folder, tasks = await prepared()
    assert tasks == 54
    made = (folder / "manifest.json").stat().st_mtime_ns
    assert await prepared() == (folder, 54)
    assert (folder / "manifest.json").stat().st_mtime_ns == made, "nothing was prepared again"
    other, fewer = await prepared("--data.max_tasks=20")
    assert (other != folder, fewer) == (True, 20)
    write_tasks(shop=70)
    later = folder.stat().st_mtime + 10
    os.utime("tasks.json", (later, later))
    assert await prepared(refresh=False) == (folder, 54), "a resumed run keeps its data"
    assert await prepared() == (folder, 63)
