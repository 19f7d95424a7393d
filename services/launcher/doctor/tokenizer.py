"""Whether learner and rollout will turn the same messages into the same token ids."""

import json
from pathlib import Path

from services.common.fingerprint import TokenizerDigests, tokenizer_digests
from services.launcher.doctor.findings import Finding, Status, UnprobedError, fail, ok, warn
from services.launcher.doctor.policy import NoPolicyError, policy_folder, without
from services.launcher.doctor.probe_process import ask
from services.launcher.doctor.run_context import Subject


async def tokenizer(subject: Subject) -> list[Finding]:
    """The learner goes by digests of the files; rollouts render with what transformers loads."""
    try:
        folder = await policy_folder(subject)
        digests = tokenizer_digests(folder)
        second = _second_template(folder)
    except NoPolicyError as error:
        return [without(subject, error)]
    except FileNotFoundError:
        fix = (
            "choose a model with a fast tokenizer, or save one: AutoTokenizer(...).save_pretrained"
        )
        return [fail(f"{subject.shared.policy.model} has no tokenizer.json", fix)]
    except ValueError as error:
        return [fail(f"tokenizer_config.json is no JSON: {error}", "fetch the model again")]
    told = [ok(f"digest {digests.whole.hex()[:16]}"), *second, *_pinned(subject)]
    try:
        python = subject.interpreter("tokenizers", "transformers")
    except UnprobedError as error:
        return [*told, error.finding]
    loaded = await ask(python, "tokenizer_probe", _question(folder, digests), subject.environ)
    bad = [finding for finding in loaded if finding.status is not Status.OK]
    return [*told, *(bad or loaded)]


def _question(folder: Path, digests: TokenizerDigests) -> dict[str, str]:
    return {"folder": str(folder), "chat_template": digests.chat_template.hex()}


def _second_template(folder: Path) -> list[Finding]:
    """Both sides take chat_template.jinja where there is one. Others may take the other one."""
    first, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not (first.exists() and config.exists()):
        return []
    second = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if not second or second == first.read_text(encoding="utf-8"):
        return []
    what = f"{config.name} has another chat template than {first.name}, which runs go by"
    return [
        warn(what, f"keep one: take chat_template out of {config.name}, or remove {first.name}")
    ]


def _pinned(subject: Subject) -> list[Finding]:
    """Machines fetch for themselves, days apart: without a revision they may get another one."""
    policy = subject.shared.policy
    if subject.backend == "local" or policy.revision or Path(policy.model).is_dir():
        return []
    fix = "set policy.revision to a commit of the hub"
    return [warn("policy.revision is not set: each machine takes what is newest then", fix)]
