"""The command that installs an optional part of this project."""


def install_command(extra: str) -> str:
    """Return the command that installs `extra`, one of pyproject.toml's optional dependencies.

    It is for a checkout: the name `flotilla` on PyPI belongs to another project."""
    return f'pip install ".[{extra}]" in Flotilla\'s checkout'
