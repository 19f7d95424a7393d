"""A program that reads the tables of several services in a spec, and imports only their classes:

    python -m flotilla_launcher.control.read_tables spec.toml NAME=MODULE:CLASS ... < spec.json

Its exit code is 2 if one is wrong, with every problem of all tables on standard output."""

import importlib
import sys
from collections.abc import Sequence

from flotilla_common.process.exit_codes import CONFIG, OK
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_common.spec.spec import ServiceConfig, parse_shared
from flotilla_common.spec.spec_loading import STANDARD_INPUT, load_spec
from flotilla_common.text.printable_text import print_visible


def main(arguments: Sequence[str]) -> int:
    where, *services = arguments
    problems: list[str] = []
    try:
        spec = load_spec(STANDARD_INPUT)
        shared = parse_shared(spec, where=where)
    except ConfigError as error:
        print_visible(str(error))
        return CONFIG
    for service in services:
        name, _, place = service.partition("=")
        try:
            config = parse_config(
                _import_table(place), spec.get(name, {}), where=where, section=name
            )
            if isinstance(config, ServiceConfig):
                config.check(shared)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        print_visible("\n".join(problems))
    return CONFIG if problems else OK


def _import_table(place: str) -> type[ConfigModel]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
