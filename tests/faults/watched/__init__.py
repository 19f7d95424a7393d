"""Services under a watcher each, as on rented machines: modules for `[launcher.modules]`.

Each start is another machine, with nothing of the run on it: a folder of FLOTILLA_TEST_MACHINES,
called `SERVICE-NUMBER`. A file `notice` in it takes the machine away.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from flotilla_common.process.arguments import TOKEN_VARIABLE, read_token

MACHINES = "FLOTILLA_TEST_MACHINES"
NOTICE, OUTPUT = "notice", "watcher.log"


def watch(service: str, module: str) -> NoReturn:
    """Become the watcher of processes that the launcher has started here, as module `module`."""
    if "--check-config" in sys.argv:
        _become("-m", module, *sys.argv[1:])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--config", "--run-id", "--run-dir", "--replica", "--registry"):
        parser.add_argument(name, required=True)
    parser.add_argument("--token-file", type=Path)
    given, rest = parser.parse_known_args()
    os.environ[TOKEN_VARIABLE] = read_token(given.token_file)
    machine = _new_machine(service)
    run_dir = machine / given.run_id
    shared = ["--config", given.config, "--run-id", given.run_id, "--run-dir", str(run_dir)]
    shared += ["--replica", given.replica, "--registry", given.registry]
    own = ["--service", service, "--notice-file", str(machine / NOTICE)]
    # The launcher's log of this replica is for what the watcher sends.
    output = os.open(machine / OUTPUT, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    service_command = [sys.executable, "-m", module, *shared, *rest]
    _become("-m", "flotilla_launcher.agent", *shared, *own, "--", *service_command)


def _new_machine(service: str) -> Path:
    machines = Path(os.environ[MACHINES])
    number = 1 + len(list(machines.glob(f"{service}-*")))
    machine = machines / f"{service}-{number}"
    machine.mkdir(parents=True)
    return machine


def _become(*arguments: str) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *arguments])
