"""Whole runs of tiny vision models on screens, with real vLLM."""

import hashlib
import json
from pathlib import Path
from typing import Any

from flotilla_environments.tasks import make_tasks

TRAINED = {"tower": "trained", "projector": "trained"}
# Random tokens click nothing, so that their rewards are forced: attempts that wrote different
# tokens earn different ones.
VERIFIER = '''\
def forced(env, final_answer=None, conversation=None):
    """Earn what the characters of the conversation add up to."""
    return sum(map(ord, conversation or "")) % 101 / 100
'''
# One reply each, of at most 24 tokens: enough to compare what the last version sampled.
_EVAL_TASKS = 8


def vision_spec(
    model: Path,
    folder: Path,
    vision: dict[str, Any],
    *,
    groups: int,
    attempts: int,
    steps: int,
    **learner: Any,
) -> dict[str, Any]:
    """Return the spec of a run whose tasks, each for one group, are written to `folder`."""
    digest = hashlib.sha256(VERIFIER.encode()).hexdigest()
    (folder / "verifiers.sha256").write_text(f"{digest}  forced\n")
    heldout = _write_tasks(folder, "heldout", _EVAL_TASKS)
    return {
        "name": "vision",
        "policy": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 3072,
            "vision": vision,
        },
        "env_gateway": {
            "backend": "mcp",
            "servers": [
                {
                    "command": ["python", "-P", "-m", "flotilla_environments.serve"],
                    "instances": True,
                }
            ],
            "verifiers": {"digests": "verifiers.sha256", "partial": "off"},
        },
        "rollout": {
            "max_attempts": groups * attempts,
            "max_turns": 3,
            "max_input_length": 2900,
            "max_generate_length": 24,
            "dialect": {"name": "full", "finish": "done"},
            "engine": {"device": "cpu", "max_num_seqs": groups * attempts},
        },
        "learner": {
            "tasks": _write_tasks(folder, "train", steps * groups),
            "steps": steps,
            "groups_per_step": groups,
            "group_size": attempts,
            "optimizer": {"lr": 1e-3},
            "eval": {"sets": [{"name": "heldout", "tasks": heldout}]},
            **learner,
        },
    }


def _write_tasks(folder: Path, split: Any, count: int) -> str:
    """Tasks on screens, with the verifier of forced rewards."""
    tasks = [
        dict(task) | {"verifier_func": VERIFIER} for task in make_tasks(("screen",), split, count)
    ]
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"tasks": tasks}))
    return str(path)
