"""Whether processes as the ranks and engines are can join one group and pass tensors around."""

import secrets

from services.launcher.adapters.local import visible_gpus
from services.launcher.doctor.children import ask
from services.launcher.doctor.results import Finding
from services.launcher.doctor.subject import Subject
from services.launcher.runs import LEARNER, ROLLOUT

_MOST, _LEAST = 3, 2


async def ring(subject: Subject) -> list[Finding]:
    rank = subject.section(LEARNER)["rank"]
    planned = rank["processes"] + subject.plan.config.replicas()[ROLLOUT]
    gpus = len(visible_gpus()) if rank["device"] == "cuda" else 0
    question = {
        "world": max(_LEAST, min(_MOST, planned)),
        "backend": "nccl" if gpus >= _LEAST else "gloo",
        "gpus": gpus,
        "group": secrets.token_hex(4),
    }
    return await ask(subject.interpreter(), "probes_ring", question, subject.environ)
