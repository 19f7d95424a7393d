"""The processes of one episode's servers, and the folder in which they run."""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flotilla_common.aio.concurrency import cancel_tasks, raise_failure
from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.adapters import process_namespace
from flotilla_env_gateway.adapters.child_process import ChildProcess
from flotilla_env_gateway.adapters.mcp.episode_folders import TMP, EpisodeFolder, EpisodeFolders
from flotilla_env_gateway.adapters.server_address import configured_environment
from flotilla_env_gateway.config.backends import EPISODE_DIR, McpServer

_TMP_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh")


@dataclass(slots=True)
class EpisodeProcesses:
    """The running servers of one episode, in the order of their settings, and the folder that they
    share; None if the state of episodes is shared."""

    children: Sequence[ChildProcess]
    folders: EpisodeFolders | None
    folder: EpisodeFolder | None
    _ending: asyncio.Task[None] | None = field(default=None, init=False)

    async def restore_folder(self) -> None:
        """Bring the folder back to its beginning, with the servers running. Raises OSError."""
        if self.folders is not None and self.folder is not None:
            await self.folders.restore_folder(self.folder)

    async def close(self) -> None:
        """End the servers with all that they started, then remove their folder. Goes on if the
        caller is cancelled. Idempotent."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        ends = [asyncio.create_task(child.close()) for child in self.children]
        if ends:
            await asyncio.wait(ends)
        if self.folders is not None and self.folder is not None:
            await self.folders.remove_folder(self.folder)
        raise_failure(ends)


class EpisodeServers:
    """Starts the processes of one or several servers for each episode.

    Unless a server shares its state, its process runs in the episode's own folder: a copy of the
    templates, its path in the place of {episode_dir}. Temporary files are the episode's own as
    well: by TMPDIR, and with bubblewrap in /tmp itself, unless something that the server gets lies
    there. The home folder, with the caches of package managers, is shared."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        """Raises ConfigError."""
        templates, environments = read_settings(servers)
        self._commands = [
            _Command.of_server(server, environment, templates)
            for server, environment in zip(servers, environments, strict=True)
        ]
        shared = all(server.shared_state for server in servers)
        self._folders = None if shared else EpisodeFolders(templates)

    async def start_processes(self, variables: Mapping[str, str]) -> EpisodeProcesses:
        """Start the processes with further variables. Raises OSError."""
        folder = None
        if self._folders is not None:
            bwrap = await asyncio.to_thread(process_namespace.find_bubblewrap)
            folder = await self._folders.make_folder(mounted=bwrap is not None)
        starts = [asyncio.create_task(each.start(folder, variables)) for each in self._commands]
        try:
            children = await asyncio.gather(*starts)
        except BaseException:
            await cancel_tasks(starts)
            started = [
                each.result() for each in starts if not each.cancelled() and not each.exception()
            ]
            await EpisodeProcesses(started, self._folders, folder).close()
            raise
        return EpisodeProcesses(children, self._folders, folder)

    async def close(self) -> None:
        """Remove all folders; the processes have ended."""
        if self._folders is not None:
            await self._folders.close()


@dataclass(frozen=True, slots=True)
class _Command:
    """The command of a server, with `environment` in addition to that of any child."""

    server: str
    words: Sequence[str]
    environment: Mapping[str, str]
    shared_state: bool
    task_variables: bool

    @classmethod
    def of_server(
        cls, server: McpServer, environment: Mapping[str, str], templates: Sequence[Path]
    ) -> "_Command":
        assert server.command is not None, "checked by McpServer"
        words: Sequence[str] = server.command
        if not server.shared_state:
            words = tuple(_locate_programs(server, templates))
        return cls(server.name, words, environment, server.shared_state, server.task_variables)

    async def start(
        self, folder: EpisodeFolder | None, variables: Mapping[str, str]
    ) -> ChildProcess:
        """Start the command, in the folder unless it shares its state. Raises OSError."""
        try:
            return await self._start(folder, variables if self.task_variables else {})
        except OSError as error:
            raise OSError(f"server {self.server}: {self.words[0]}: {error}") from error

    async def _start(
        self, folder: EpisodeFolder | None, variables: Mapping[str, str]
    ) -> ChildProcess:
        if folder is None or self.shared_state:
            return await ChildProcess.start(self.words, {**self.environment, **variables})
        given = {name: _fill_in(value, folder) for name, value in self.environment.items()}
        environment = {**dict.fromkeys(_TMP_VARIABLES, str(folder.temporary)), **given, **variables}
        mounts = [(folder.root, folder.seen)]
        if not _needs_tmp(self.words, self.environment):
            mounts.insert(0, (folder.root / "tmp", TMP))
        return await ChildProcess.start(
            [_fill_in(word, folder) for word in self.words],
            environment,
            folder=folder.files,
            mounts=mounts,
        )


def read_settings(servers: Sequence[McpServer]) -> tuple[list[Path], list[dict[str, str]]]:
    """Return the templates of servers and the environment of each. Raises ConfigError for a
    template that is missing or has a file of another one, and for a variable that is not set."""
    environments = [configured_environment(each, where=each.where) for each in servers]
    return _list_templates(servers), environments


def _list_templates(servers: Sequence[McpServer]) -> list[Path]:
    """Return the templates of servers, each once. Raises ConfigError."""
    found: dict[Path, McpServer] = {}
    for server in servers:
        if server.template is not None:
            if not server.template.is_dir():
                raise ConfigError(f"{server.where}.template: {server.template} is not a folder")
            found.setdefault(server.template, server)
    # Files by their name in the folder; a folder may be in several templates.
    files: dict[str, McpServer] = {}
    for template, server in found.items() if len(found) > 1 else ():
        for path in template.rglob("*"):
            name = str(path.relative_to(template))
            if (path.is_symlink() or not path.is_dir()) and name in files:
                raise ConfigError(
                    f"{server.where}.template: {name} is also in the template of"
                    f" {files[name].name!r}, and both are copied into one folder"
                )
            files[name] = server
    return list(found)


def _fill_in(text: str, folder: EpisodeFolder) -> str:
    # No other braces are touched: an argument may be JSON.
    return text.replace(EPISODE_DIR, str(folder.files))


def _locate_programs(server: McpServer, templates: Sequence[Path]) -> Iterator[str]:
    """Yield the words of a command, those that name a program or script in our working directory as
    absolute paths; the templates' come first. Raises ConfigError for one that is nowhere."""
    for number, word in enumerate(server.command or ()):
        named = word.endswith(_SCRIPTS) or (number == 0 and "/" in word)
        if not named or EPISODE_DIR in word or any((each / word).exists() for each in templates):
            yield word
        elif os.path.isfile(word):
            yield os.path.abspath(word)
        elif number < 2:
            # Later words may name files that the server is to make.
            raise ConfigError(f"{server.where}.command: there is no file {word} in {os.getcwd()}")
        else:
            yield word


def _needs_tmp(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return True if a server gets a path in /tmp, which must then be everybody's."""
    inherited = child_environment()
    for name in _TMP_VARIABLES:
        inherited.pop(name, None)
    texts = (*command, *environment.values(), *inherited.values(), sys.executable, os.getcwd())
    return any(f"{TMP}/" in text for text in texts)
