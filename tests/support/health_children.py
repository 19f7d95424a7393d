"""Processes of `health_child.py` as services that a command keeps."""

import os
from pathlib import Path

import psutil

from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.free_ports import free_address
from flotilla_launcher.cli.kept_services import KeptService
from tests.support.repository import ROOT

_MODULE = "tests.support.health_child"


def make_health_child(folder: Path, *words: str) -> KeptService:
    address = free_address()
    return KeptService(
        name="the child",
        command=python_command("-m", _MODULE, "--listen", address, *words),
        address=address,
        log=folder / "logs" / "child.log",
        inherits=(),
        variables={"PYTHONPATH": os.pathsep.join((str(ROOT / "gen"), str(ROOT)))},
    )


def health_children() -> list[psutil.Process]:
    """Return those of this process that run."""
    found = psutil.Process().children(recursive=True)
    return [each for each in found if _MODULE in each.cmdline()]
