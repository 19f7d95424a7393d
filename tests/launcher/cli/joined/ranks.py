"""A stand-in for a further machine of a learner: prints its arguments, and exits with the code
in the file `end` beside the spec, once there is one."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


def main() -> None:
    words = sys.argv[1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    folder = Path(given["--config"]).parent
    signal.signal(signal.SIGTERM, _drain)
    token = Path(given["--token-file"]).read_text()
    certificates = sorted(path.name for path in Path(given["--tls-dir"]).iterdir())
    print(json.dumps({**given, "token": token, "certificates": certificates}), flush=True)
    end = folder / "end"
    while not end.exists():
        time.sleep(0.02)
    code = int(end.read_text())
    end.unlink()
    print(f"ending with {code}", flush=True)
    sys.exit(code)


def _drain(*_: object) -> NoReturn:
    print("draining", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
