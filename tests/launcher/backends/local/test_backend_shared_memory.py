"""Runs of one machine, and users of one machine, do not touch each other's shared memory."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest

from flotilla_common.weights.shared_memory import (
    SHARED_MEMORY,
    private_folder,
    remove_folders,
    shared_name,
)
from flotilla_launcher.backends.local.backend import LocalBackend
from tests.support.repository import ROOT
from tests.support.started_process import started

IS_ROOT = os.geteuid() == 0
# The user `nobody`, and an ordinary user.
STRANGER, USER = 65534, 12345
ENVIRON = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/gen"}


def test_one_id_in_two_folders_has_two_names(tmp_path: Path) -> None:
    assert shared_name("run", tmp_path / "a" / "run") != shared_name("run", tmp_path / "b" / "run")


def test_a_folder_has_one_name_however_it_is_written(tmp_path: Path) -> None:
    crooked = tmp_path / "x" / ".." / "run"
    assert shared_name("run", crooked) == shared_name("run", tmp_path / "run")


async def test_what_a_run_left_is_removed_and_no_more(tmp_path: Path) -> None:
    folders = {
        "own": tmp_path / "a" / "run",
        "of the same id": tmp_path / "b" / "run",
        "of an id that begins alike": tmp_path / "a" / "run-2",
    }
    with ExitStack() as stack:
        held = {
            whose: stack.enter_context(private_folder(f"{shared_name(at.name, at)}-learner"))
            for whose, at in folders.items()
        }
        for folder in held.values():
            (folder / "slot0.safetensors").touch()
        evidence = await LocalBackend(tmp_path / "a").clean_run("run")
        assert evidence.gone
        assert {whose for whose, folder in held.items() if not folder.exists()} == {"own"}


def test_a_folder_is_its_users_alone_cannot_be_guessed_and_goes_with_its_process(
    tmp_path: Path,
) -> None:
    name = shared_name("run", tmp_path)
    with private_folder(name) as one, private_folder(name) as two:
        assert one != two and one.is_dir(), "that of a process that lives is left alone"
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        assert len(one.name) >= len(name) + 8
        (one / "weights").touch()
    assert not one.exists() and not two.exists()


def test_what_a_killed_process_left_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    name = shared_name("run", tmp_path)
    program = f"""
        import sys, time
        from flotilla_common.weights.shared_memory import private_folder
        with private_folder({name!r}) as folder:
            (folder / "weights").touch()
            print(folder, flush=True)
            time.sleep(60)
    """
    with started(words(program), env=ENVIRON) as (process, line):
        left = Path(line.strip())
        with private_folder(name):
            assert left.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (left / "weights").exists()
        with private_folder(name):
            assert not left.exists()


def test_a_link_under_the_name_of_a_run_is_neither_followed_nor_counted(tmp_path: Path) -> None:
    name = shared_name("run", tmp_path)
    link = SHARED_MEMORY / f"{name}-link"
    (tmp_path / "file").write_text("mine")
    link.symlink_to(tmp_path)
    try:
        assert remove_folders(name) == []
        assert link.is_symlink() and (tmp_path / "file").exists()
    finally:
        link.unlink()


@pytest.mark.skipif(not IS_ROOT, reason="two users are played, which root alone can do")
def test_names_of_a_stranger_stop_no_run_and_are_left_alone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    name = shared_name("run", runs / "run")
    taken = [SHARED_MEMORY / f"{name}-{rest}" for rest in ("slot0.safetensors", "learner-abcdefgh")]
    link = SHARED_MEMORY / f"{name}-batch.safetensors"
    try:
        taken[0].write_text("mine")
        taken[1].mkdir()
        link.symlink_to("/etc/hostname")
        for path in (*taken, link):
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        output = as_user(
            f"""
            import asyncio, pathlib
            from flotilla_common.weights.shared_memory import private_folder
            from flotilla_launcher.backends.local.backend import LocalBackend
            with private_folder({f"{name}-learner"!r}) as folder:
                (folder / "weights").write_text("of the user")
                print(asyncio.run(LocalBackend(pathlib.Path({str(runs)!r})).clean_run("run")).gone)
                print(folder.exists())
            """
        )
        assert output.split() == ["True", "False"]
        assert all(os.path.lexists(path) for path in (*taken, link))
        assert taken[0].read_text() == "mine"
    finally:
        remove_folders(name)
        link.unlink(missing_ok=True)
        taken[0].unlink(missing_ok=True)
        taken[1].rmdir()


@pytest.mark.skipif(not IS_ROOT, reason="two users are played, which root alone can do")
def test_a_stranger_cannot_look_into_a_folder_or_take_its_place(tmp_path: Path) -> None:
    with private_folder(shared_name("run", tmp_path)) as folder:
        (folder / "weights").write_text("secret")
        output = as_user(
            f"""
            import os, pathlib
            folder = pathlib.Path({str(folder)!r})
            for attempt in (
                lambda: os.listdir(folder),
                lambda: (folder / "weights").read_text(),
                lambda: (folder / "new").write_text(""),
                lambda: folder.rename({str(folder)!r} + "x"),
                lambda: folder.rmdir(),
            ):
                try:
                    attempt()
                    print("done")
                except PermissionError:
                    print("refused")
            """
        )
        assert output.split() == ["refused"] * 5


def words(program: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(program)]


def as_user(program: str) -> str:
    """The output of a program run by an unprivileged user. It imports first: the user need not be
    able to read the repository."""
    imports = (
        "import flotilla_launcher.backends.local.backend, flotilla_common.weights.shared_memory\n"
    )
    imports += "import asyncio, concurrent.futures.thread\n"
    become = f"import os; os.setgroups([]); os.setgid({USER}); os.setuid({USER})\n"
    command = words(imports + become + textwrap.dedent(program))
    return subprocess.check_output(command, text=True, env=ENVIRON, timeout=60)
