"""Command line: `python -m tools.model_zoo` completes `build/zoo/`."""

import sys
import time

from tools.model_zoo.registries import RegistryError
from tools.model_zoo.zoo import ZOO, complete_zoo, read_archives


def main() -> int:
    started = time.monotonic()
    try:
        fetched = complete_zoo(ZOO, read_archives())
    except RegistryError as error:
        print(f"error: build/zoo is not complete: {error}", file=sys.stderr)
        return 1
    kept = sum(path.stat().st_size for path in ZOO.rglob("*") if path.is_file())
    size = sum(archive.size for archive in fetched)
    print(
        f"build/zoo: {len(fetched)} packages fetched ({size / 1e6:.0f} MB), "
        f"{kept / 1e6:.0f} MB kept, {time.monotonic() - started:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
