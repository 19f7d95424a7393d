"""Checks a spec like a service, in no time: refuses what it finds under `[learner] refuse`."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    refusal = spec.get("learner", {}).get("refuse")
    if refusal:
        sys.exit(f"error: learner.{refusal}")
