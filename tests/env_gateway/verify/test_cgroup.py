"""Control groups of sandboxes: made where permitted, entered, and removed."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla_env_gateway.verify import cgroup
from flotilla_env_gateway.verify.cgroup import ControlGroups
from flotilla_env_gateway.verify.sandbox import Sandbox
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_process import ProcessCommand, StartError, VerifierProcess
from tests.env_gateway.verify.sandboxed import needs_sandbox
from tests.env_gateway.verify.test_verifier_process import UNTRUSTED

Tree = Callable[..., Path]
MEMORY = 2**28


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tree:
    """Build a fake hierarchy of groups, with this process in /a/own."""

    def build(**enabled: str) -> Path:
        for name in ("", "a", "a/own"):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").touch()
            (folder / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
            (folder / "cgroup.subtree_control").write_text(enabled.get(folder.name, ""))
        (tmp_path / "self").write_text("12:pids:/\n0::/a/own\n")
        return tmp_path

    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "_OWN", tmp_path / "self")
    # A user may also enable controllers of its own groups; another test covers that.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return build


def limits(group: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in group.glob("*.max")}


def test_a_group_limits_what_its_parent_has_controllers_for(tree: Tree) -> None:
    root = tree(a="memory pids")
    groups = ControlGroups.find_usable(MEMORY)
    assert groups is not None
    group = groups.make_group()
    assert group.parent == root / "a"
    assert limits(group) == {"memory.max": str(MEMORY + 2**26), "pids.max": "16"}
    assert set(groups.limits) == {"memory.max", "pids.max"}


def test_without_controllers_there_are_no_groups(tree: Tree) -> None:
    tree()
    assert ControlGroups.find_usable(MEMORY) is None


def test_in_an_older_hierarchy_there_are_no_groups(tree: Tree) -> None:
    root = tree(a="memory pids")
    (root / "cgroup.controllers").unlink()
    assert ControlGroups.find_usable(MEMORY) is None


def test_where_no_process_gets_in_there_are_no_groups(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(a="memory pids")
    monkeypatch.setattr(cgroup, "_JOIN", 'echo $$ > "$0/no/cgroup.procs" && exec "$@"')
    assert ControlGroups.find_usable(MEMORY) is None


def test_who_was_delegated_a_group_enables_its_controllers(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree()
    written: list[tuple[str, str]] = []
    write = Path.write_text

    def enable(path: Path, text: str) -> int:
        if path.name != "cgroup.subtree_control":
            return write(path, text)
        written.append((path.parent.name, text))
        if path.parent.name == "own":
            raise OSError(16, "it has processes")
        return write(path, f"{path.read_text()} {text.strip('+')}")

    monkeypatch.setattr(Path, "write_text", enable)
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(cgroup, "_owner", lambda path: 7)
    groups = ControlGroups.find_usable(MEMORY)
    assert groups is not None and groups.make_group().parent == root / "a"
    assert set(groups.limits) == {"memory.max", "pids.max", "cpu.max"}
    assert ("own", "+memory") in written and ("a", "+pids") in written


def test_what_a_killed_gateway_left_is_removed(tree: Tree) -> None:
    root = tree(a="memory")
    left, used = (root / "a" / f"flotilla-verifier-{pid}-0" for pid in (2**22 + 1, os.getppid()))
    left.mkdir()
    used.mkdir()
    ControlGroups.find_usable(MEMORY)
    assert not left.exists() and used.exists()


async def test_a_group_that_cannot_be_made_is_a_precise_error(tmp_path: Path) -> None:
    groups = ControlGroups(tmp_path / "gone", {})
    sandbox = Sandbox("bwrap", memory_bytes=MEMORY, cpu_s=1, groups=groups)
    with pytest.raises(StartError, match="no control group for the sandbox"):
        sandbox.make_command()


async def test_the_group_of_a_process_that_does_not_start_is_removed(tmp_path: Path) -> None:
    for number, argv in enumerate([("/nowhere/python",), ("/bin/echo", "no worker")]):
        group = tmp_path / str(number)
        group.mkdir()
        with pytest.raises(StartError):
            await VerifierProcess.start_process(ProcessCommand(argv, group=group))
        assert not group.exists()


def hierarchy() -> Path | None:
    """Return where groups of version 2 may be made here, even without controllers."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    return next((path for path in found if os.access(path, os.W_OK)), None)


def members(group: Path) -> set[str]:
    pids = (group / "cgroup.procs").read_text().split()
    return {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}


@needs_sandbox
@pytest.mark.skipif(hierarchy() is None, reason="no cgroup2 that this user may write to")
async def test_all_of_a_sandbox_is_in_its_group_which_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = hierarchy()
    assert parent is not None
    monkeypatch.setattr(
        ControlGroups, "find_usable", lambda memory_bytes: ControlGroups(parent, {})
    )
    sandbox = Sandbox.find_installed(memory_bytes=MEMORY, cpu_s=5)
    assert sandbox is not None
    command = sandbox.make_command()
    worker = await VerifierProcess.start_process(command)
    assert command.group is not None
    names = members(command.group)
    assert "bwrap" in names and any(name.startswith("python") for name in names)
    await worker.kill()
    assert not command.group.exists()
    pool = VerifierPool(size=2, memory_bytes=MEMORY)
    executions = await asyncio.gather(
        *(pool.run_verifier(UNTRUSTED, timeout_s=20.0) for _ in range(4))
    )
    await pool.close()
    assert [execution.result for execution in executions] == [1] * 4
    assert not list(parent.glob(f"flotilla-verifier-{os.getpid()}-*"))
