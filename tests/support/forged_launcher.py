"""Imports of the launcher, of its agent, of the `flotilla` command and of fake services, for a
forge."""

import pkgutil
from importlib import import_module

from flotilla_launcher import cli
from tests.support.process_forge import fork_children

_COMMANDS = [found.name for found in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}.")]

_ENTRIES = ("flotilla_launcher.__main__", "flotilla_launcher.agent.__main__")

for _name in (*_COMMANDS, *_ENTRIES, "tests.support.fake_service"):
    import_module(_name)
fork_children()
