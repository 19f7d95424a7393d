"""A program in place of `ssh`: what is to run on another machine runs on this one."""

from pathlib import Path

# Ports are the same ones here, so none is forwarded. The other machine has a home of its own.
_TEXT = """#!/bin/sh
echo "$@" >> {log}
while [ "${{1#-}}" != "$1" ]; do
  case "$1" in -o|-L) shift ;; esac
  shift
done
export HOME={home}
exec sh -c "$2"
"""


def put_ssh_double(folder: Path, home: Path) -> Path:
    """Write `ssh` into a folder for PATH; return the file that has the arguments of its calls."""
    log = folder / "ssh.log"
    write_program(folder / "ssh", _TEXT.format(log=log, home=home))
    log.touch()
    return log


def write_program(path: Path, text: str) -> None:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o700)
