"""The process of one episode's server, and the folder in which it runs."""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common.child_environment import child_environment
from services.common.errors import ConfigError
from services.env_gateway.adapters import process_namespace
from services.env_gateway.adapters.child_process import ChildProcess
from services.env_gateway.adapters.mcp.episode_folders import EpisodeFolder, EpisodeFolders
from services.env_gateway.config.backends import EPISODE_DIR, McpServer

_TMP = Path("/tmp").resolve()
_TMP_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh")


@dataclass(slots=True)
class EpisodeProcess:
    """A running server. `folder` is None if the state of episodes is shared."""

    child: ChildProcess
    folders: EpisodeFolders | None
    folder: EpisodeFolder | None
    _ending: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def stdin(self) -> asyncio.StreamWriter:
        return self.child.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        return self.child.stdout

    async def describe_end(self) -> str:
        return await self.child.describe_end()

    async def close(self) -> None:
        """End the server with all that it started, then remove its folder. Goes on if the caller is
        cancelled. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        try:
            await self.child.close()
        finally:
            if self.folders is not None and self.folder is not None:
                await self.folders.remove_folder(self.folder)


class EpisodeProcesses:
    """Starts a server's process for each episode, with `environment` in addition to that of any
    child.

    Unless the server shares its state, the process runs in a folder of its own: a copy of the
    template, its path in the place of {episode_dir}. Temporary files are the episode's own as well:
    by TMPDIR, and with bubblewrap in /tmp itself, unless something that the server gets lies there.
    The home folder, with the caches of package managers, is shared."""

    def __init__(self, server: McpServer, environment: Mapping[str, str]) -> None:
        """Raises ConfigError if the template is missing."""
        assert server.command is not None, "checked by McpServer"
        template = server.template
        if template is not None and not template.is_dir():
            raise ConfigError(f"env_gateway.backends.mcp.template: {template} is not a folder")
        self._environment = environment
        self._folders = None if server.shared_state else EpisodeFolders(template)
        self._command: Sequence[str] = server.command
        if self._folders is not None:
            self._command = list(_locate_programs(server.command, template))

    async def start_process(self, variables: Mapping[str, str]) -> EpisodeProcess:
        """Start a process with further variables. Raises OSError."""
        if self._folders is None:
            child = await ChildProcess.start(self._command, {**self._environment, **variables})
            return EpisodeProcess(child, None, None)
        bwrap = await asyncio.to_thread(process_namespace.find_bubblewrap)
        folder = await self._folders.make_folder(mounted=bwrap is not None)
        try:
            child = await self._start_in_folder(folder, variables)
        except BaseException:
            await self._folders.remove_folder(folder)
            raise
        return EpisodeProcess(child, self._folders, folder)

    async def close(self) -> None:
        """Remove all folders; the processes have ended."""
        if self._folders is not None:
            await self._folders.close()

    async def _start_in_folder(
        self, folder: EpisodeFolder, variables: Mapping[str, str]
    ) -> ChildProcess:
        given = {name: _fill_in(value, folder) for name, value in self._environment.items()}
        environment = {**dict.fromkeys(_TMP_VARIABLES, str(folder.temporary)), **given, **variables}
        mounts = [(folder.root, folder.seen)]
        if not _needs_tmp(self._command, self._environment):
            mounts.insert(0, (folder.root / "tmp", _TMP))
        return await ChildProcess.start(
            [_fill_in(word, folder) for word in self._command],
            environment,
            folder=folder.files,
            mounts=mounts,
        )


def _fill_in(text: str, folder: EpisodeFolder) -> str:
    # No other braces are touched: an argument may be JSON.
    return text.replace(EPISODE_DIR, str(folder.files))


def _locate_programs(command: Sequence[str], template: Path | None) -> Iterator[str]:
    """Yield the words of a command, those that name a program or script in our working directory as
    absolute paths; the template's come first."""
    for number, word in enumerate(command):
        names_program = word.endswith(_SCRIPTS) or (number == 0 and "/" in word)
        in_template = template is not None and (template / word).exists()
        located = names_program and not in_template and Path(word).is_file()
        yield os.path.abspath(word) if located else word


def _needs_tmp(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if a server gets a path in /tmp, which must then be everybody's."""
    inherited = child_environment()
    for name in _TMP_VARIABLES:
        inherited.pop(name, None)
    texts = (*command, *environment.values(), *inherited.values(), sys.executable, os.getcwd())
    return any(f"{_TMP}/" in text for text in texts)
