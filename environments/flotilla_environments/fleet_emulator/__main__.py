"""Start of the emulator, or an error about missing packages; the command is in `command`."""

import sys
from importlib.util import find_spec

_NEEDED = ("fleet", "PIL", "mcp", "starlette", "uvicorn")


def main() -> int:
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"error: not installed: {', '.join(missing)}; the emulator needs the extra `emulator`: "
            "pip install 'flotilla-rl-environments[emulator]'"
            " (in a checkout: uv pip install -e '.[emulator]')",
            file=sys.stderr,
        )
        return 1
    from flotilla_environments.fleet_emulator import command

    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
