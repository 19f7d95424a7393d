"""The command line that all services share."""

import argparse
import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from flotilla_common.rpc.auth import check_token
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TLS_VARIABLE
from flotilla_common.spec.config import ConfigModel, find_tables

TOKEN_VARIABLE = "FLOTILLA_TOKEN"
RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_OVERRIDE = re.compile(r"--\w+(\.\w+)*=.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line; `overrides` are the dotted options, in order."""

    config: Path
    check_config: bool
    print_config: bool
    run_id: str | None
    run_dir: Path | None
    replica: int
    listen: str
    advertise: str | None
    metrics_listen: str | None
    registry: str | None
    peers: dict[str, str]
    token_file: Path | None
    tls_dir: Path | None
    overrides: tuple[str, ...]


def parse_arguments(
    service: str, config_cls: type[ConfigModel], doc: str, argv: Sequence[str]
) -> Arguments:
    """Parse a command line.

    On an error it prints a message and exits with code 2, as argparse does."""
    parser = _parser(service, config_cls, doc)
    known, rest = parser.parse_known_args(argv)
    for word in rest:
        if not _OVERRIDE.fullmatch(word):
            parser.error(f"{word!r}: unknown; overrides are written --{service}.key=value")
    given: dict[str, Any] = {**vars(known), "peers": dict(known.peers)}
    return Arguments(**given, overrides=tuple(rest))


def read_token(file: Path | None) -> str:
    """Return the bearer token from `file`, else from the environment. Raises ConfigError."""
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ConfigError(
                f"no token: set {TOKEN_VARIABLE} (or pass --token-file) to the same secret in all"
                " services; `python -c 'import secrets; print(secrets.token_hex(32))'` makes one"
            )
        return check_token(token)
    try:
        return check_token(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token file {file}: {error}") from error


def _parser(service: str, config_cls: type[ConfigModel], doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m flotilla_{service}",
        description=doc,
        epilog=_epilog(service, config_cls),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        required=True,
        metavar="SPEC",
        help="run spec: a .toml or .json, - for JSON on standard input",
    )
    add("--check-config", action="store_true", help="check whether the spec is valid, and exit")
    add(
        "--print-config",
        action="store_true",
        help="print this service's whole section as JSON, and exit",
    )
    add(
        "--run-id",
        type=_parse_run_id,
        help="default: the name of --run-dir, else the spec's name and the time",
    )
    add("--run-dir", type=Path, help="where files of the run go (default: runs/RUN_ID)")
    add(
        "--replica",
        type=_parse_replica,
        default=0,
        help="number of this process among its replicas",
    )
    listen_help = "port 0 picks a free port; beyond loopback only with TLS"
    add("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help=listen_help)
    reached_help = "where others reach this machine, if not at the listen address"
    add("--advertise", type=_parse_advertise, metavar="HOST[:PORT]", help=reached_help)
    add("--metrics-listen", metavar="HOST:PORT", help="serve Prometheus metrics there")
    add("--registry", metavar="HOST:PORT", help="the launcher, which resolves peers")
    peer_help = "address of another service, in place of a registry; repeatable"
    add(
        "--peer",
        dest="peers",
        type=_parse_peer,
        action="append",
        default=[],
        metavar="NAME=HOST:PORT",
        help=peer_help,
    )
    add("--token-file", type=Path, help=f"bearer token of the run (default: ${TOKEN_VARIABLE})")
    tls_help = f"folder with {CA_FILE}, {CERTIFICATE_FILE}, {KEY_FILE} (default: ${TLS_VARIABLE})"
    add("--tls-dir", type=Path, help=tls_help)
    return parser


def _parse_run_id(text: str) -> str:
    if not RUN_ID.fullmatch(text):
        raise argparse.ArgumentTypeError("use up to 128 of a-z 0-9 . _ -, a letter or digit first")
    return text


def _parse_replica(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("use a whole number from 0")
    return int(text)


def _parse_peer(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not name or not address.rpartition(":")[2].isdecimal():
        raise argparse.ArgumentTypeError("write NAME=HOST:PORT, as in learner=127.0.0.1:7000")
    return name, address


def _parse_advertise(text: str) -> str:
    if not text or any(character.isspace() or character in "/@" for character in text):
        raise argparse.ArgumentTypeError("write HOST or HOST:PORT, as in 203.0.113.7")
    return text


def _epilog(service: str, config_cls: type[ConfigModel]) -> str:
    # Tables of a union share keys.
    keys = dict.fromkeys(f"  --{service}.{key}={value}" for key, value in _keys(config_cls))
    return "\n".join(
        [
            "Any key of the spec can be set here, TOML values and plain text alike. Keys of",
            f"[{service}] with their defaults:",
            *keys,
            "",
            "Exit codes: 0 done or drained, 2 wrong configuration, 3 may work if tried again,",
            "1 anything else. SIGTERM and Ctrl-C drain; a second one ends the process at once.",
        ]
    )


def _keys(config_cls: type[ConfigModel]) -> Iterator[tuple[str, str]]:
    for attribute, field in config_cls.model_fields.items():
        name, annotation = field.alias or attribute, field.annotation
        if tables := list(find_tables(annotation)):
            for rest, table in tables:
                for key, value in _keys(table):
                    yield f"{name}{rest}.{key}", value
        elif field.default is PydanticUndefined:
            yield name, "..." if field.default_factory is None else _type_name(annotation)
        else:
            yield name, str(field.default)


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation) or annotation
    return f"<{getattr(origin, '__name__', str(origin))}>"
