"""The command that installs an optional part of this project."""


def install_command(extra: str) -> str:
    """Return the command that installs `extra`, one of those of `flotilla-rl`."""
    return f"pip install 'flotilla-rl[{extra}]' (in a checkout: uv pip install -e '.[{extra}]')"
