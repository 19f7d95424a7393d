"""The watcher's command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla_launcher.agent_protocol import key_of_node
from flotilla_launcher.run_spec import may_span
from flotilla_launcher.state import SERVICES, ReplicaKey
from flotilla_launcher.store.run_files import RUN_ID_PATTERN

# Metadata server of AWS and of GCP.
METADATA_URL = "http://169.254.169.254"


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line; `command` starts the service, without its secrets."""

    config: Path
    key: ReplicaKey
    # Which of the replica's machines this is.
    node: int
    run_id: str
    run_dir: Path
    registry: str
    resume: bool
    metadata_url: str
    notice_file: Path | None
    seal_key: Path | None
    command: tuple[str, ...]

    @property
    def here(self) -> ReplicaKey:
        """The key of what runs on this very machine."""
        return key_of_node(self.key, self.node)

    @property
    def label(self) -> str:
        """The name of `here` in files and messages."""
        return f"{self.here[0]}-{self.here[1]}"


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse the command line. Exits with code 2 and a message on a wrong one."""
    parser = _build_parser()
    given = vars(parser.parse_args(argv))
    service, replica = given.pop("service"), given.pop("replica")
    if not RUN_ID_PATTERN.fullmatch(given["run_id"]):
        parser.error(f"--run-id {given['run_id']!r}: use up to 128 of a-z 0-9 . _ -")
    if given["node"] < 0 or (given["node"] > 0 and not may_span(service)):
        parser.error(
            f"--node {given['node']}: a replica of {service} is one machine, 0; set"
            f" num_nodes = 1 in [launcher.sky.{service}], and take more replicas"
        )
    given["command"] = tuple(given["command"])
    if not given["command"]:
        parser.error("no command: end with `-- python -m services.SERVICE --config SPEC ...`")
    given["run_dir"] = given["run_dir"].absolute()
    return Arguments(key=(service, replica), **given)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_launcher.agent",
        description=__doc__,
        epilog="FLOTILLA_TOKEN and FLOTILLA_TLS are taken from the environment and handed to the"
        " command in files. Exit codes: the command's own; 69 the launcher was silent for too"
        " long, 75 the machine is taken away, 2 wrong configuration or nothing to resume from."
        " SIGTERM drains, for a machine that goes in 25 s; a second one ends the command at once.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="SPEC", help="run spec, outside of RUN_DIR")
    add("--service", required=True, choices=SERVICES)
    add("--replica", type=int, required=True, help="its number among its equals")
    add("--run-id", required=True)
    add("--run-dir", type=Path, required=True, help="folder for the run's files on this machine")
    add("--registry", required=True, metavar="HOST:PORT", help="the launcher's, of this run")
    add("--resume", action="store_true", help="the run has begun: never begin it again here")
    add("--node", type=int, default=0, help="which of the replica's machines this is; 0 runs it")
    add("--notice-file", type=Path, help="a file that appears when the machine is taken away")
    add("--seal-key", type=Path, help="opens the secrets that the launcher has sealed")
    add("--metadata-url", default=METADATA_URL, help="polled on spot machines")
    add("command", nargs="*", metavar="COMMAND", help="after --: what starts the service")
    return parser
