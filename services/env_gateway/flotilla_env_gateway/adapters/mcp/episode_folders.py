"""Folders of episodes, removed at the end of their episode, or of the gateway."""

import asyncio
import itertools
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.files.scratch_folders import scratch_folder
from flotilla_common.process.run_child import run_child
from flotilla_common.telemetry.log import get_logger

_LOG = get_logger(__name__)
_PREFIX = "flotilla-episodes-"
TMP = Path("/tmp").resolve()
# A server may have taken its own rights to a folder away, or be about to end.
_REMOVE = 'rm -rf -- "$0" || { sleep 1; chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }'
_REMOVE_AFTER_DEATH = f"cat; {_REMOVE}"


@dataclass(frozen=True, slots=True)
class EpisodeFolder:
    """The folder of one episode, which its server sees at another path if `seen` differs."""

    root: Path
    seen: Path

    @property
    def files(self) -> Path:
        """The folder of the environment's state."""
        return self.seen / "files"

    @property
    def temporary(self) -> Path:
        return self.seen / "tmp"


class EpisodeFolders:
    """Folders below one that exists as long as this process. If that is killed, another process
    removes them; if that is killed too, the next gateway does."""

    def __init__(self, templates: Sequence[Path]) -> None:
        self._templates = templates
        self._numbers = itertools.count()
        self._removing = BackgroundTasks()
        self._kept = ExitStack()
        self._parent, _ = self._kept.enter_context(scratch_folder(_PREFIX))
        self._kept.enter_context(_removed_after_death(self._parent))

    async def make_folder(self, *, mounted: bool) -> EpisodeFolder:
        """Make a folder with a copy of the templates; if it is `mounted` over their parent, its
        server sees it at the same path as all others, and none of them. Raises OSError."""
        root = self._parent / str(next(self._numbers))
        folder = EpisodeFolder(root, self._parent if mounted else root)
        try:
            (root / "tmp").mkdir(parents=True)
            files = root / "files"
            files.mkdir()
            await self._copy_templates(files)
        except BaseException:
            await self.remove_folder(folder)
            raise
        return folder

    async def restore_folder(self, folder: EpisodeFolder) -> None:
        """Give a folder the contents that a new one has; its processes may go on. Raises
        OSError."""
        files, temporary = folder.root / "files", folder.root / "tmp"
        # Where this is their /tmp, the folder itself is mounted in it: removing that place would
        # take the folder away from them.
        place = self._parent.relative_to(TMP) if self._parent.is_relative_to(TMP) else Path()
        kept = [
            word for part in (place, *place.parents) for word in ("!", "-path", temporary / part)
        ]
        await _run_tool(
            "find", str(files), str(temporary), "-mindepth", "1", *map(str, kept), "-delete"
        )
        await self._copy_templates(files)

    async def remove_folder(self, folder: EpisodeFolder) -> None:
        """Remove a folder whose processes have ended. Goes on if the caller is cancelled."""
        await self._removing.run_shielded(_remove(folder.root))

    async def _copy_templates(self, files: Path) -> None:
        if self._templates:
            await _run_tool(
                "cp", "-a", "--", *(f"{each}/." for each in self._templates), str(files)
            )

    async def close(self) -> None:
        """Remove all folders."""
        await asyncio.to_thread(self._kept.close)


@contextmanager
def _removed_after_death(folder: Path) -> Generator[None]:
    """Have another process remove `folder` once the block, or this whole process, has ended. It has
    none of the variables and sessions by which the processes of a service are found and ended."""
    remover = subprocess.Popen(
        ("/bin/sh", "-c", _REMOVE_AFTER_DEATH, str(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,
    )
    with remover:
        yield


async def _remove(root: Path) -> None:
    try:
        await _run_tool("sh", "-c", _REMOVE, str(root))
    except OSError as error:
        _LOG.warning("episode_folder_left", folder=str(root), why=str(error))


async def _run_tool(*command: str) -> None:
    """Run a command to its end; kill it if the caller is cancelled. Raises OSError if it fails."""
    done = await run_child(command, env={})
    if done.code:
        raise OSError(done.errors.decode(errors="replace").strip()[:500])
