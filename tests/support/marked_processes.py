"""Processes found by a variable of their environment, which all that they start inherits."""

import uuid
from collections.abc import Iterator

import psutil

from tests.support.waiting import until

_NAME = "FLOTILLA_TEST_MARK"


class Mark:
    """A variable for one test, to be added to the `environment` of a process."""

    def __init__(self) -> None:
        self._value = uuid.uuid4().hex
        self.environment = {_NAME: self._value}

    def find_commands(self) -> list[str]:
        """Return the commands of the running processes that have it."""
        return sorted(" ".join(words) for words in self._iterate_commands())

    async def wait_for(self, command: str, count: int) -> None:
        """Wait until so many of them have a command that ends with `command`."""
        await until(lambda: sum(each.endswith(command) for each in self.find_commands()) == count)

    async def wait_for_none(self) -> None:
        await until(lambda: not self.find_commands())

    def _iterate_commands(self) -> Iterator[list[str]]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(_NAME) == self._value:
                    yield process.cmdline()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
