"""Whether learner and rollout will turn the same messages into the same token ids."""

from pathlib import Path

from services.common.fingerprint import TokenizerDigests, tokenizer_digests
from services.launcher.doctor.children import ask
from services.launcher.doctor.policy import NoPolicyError, policy_folder, without
from services.launcher.doctor.results import Finding, Status, fail, ok, warn
from services.launcher.doctor.subject import Subject


async def tokenizer(subject: Subject) -> list[Finding]:
    """The learner goes by digests of the files; rollouts render with what transformers loads."""
    try:
        folder = await policy_folder(subject)
        digests = tokenizer_digests(folder)
    except NoPolicyError as error:
        return [without(subject, error)]
    except FileNotFoundError:
        fix = (
            "choose a model with a fast tokenizer, or save one: AutoTokenizer(...).save_pretrained"
        )
        return [fail(f"{subject.shared.policy.model} has no tokenizer.json", fix)]
    except ValueError as error:
        return [fail(f"tokenizer_config.json is no JSON: {error}", "fetch the model again")]
    told = [ok(f"digest {digests.whole.hex()[:16]}"), *_pinned(subject)]
    if subject.python is None:
        return told
    loaded = await ask(
        str(subject.python), "probes_tokenizer", _question(folder, digests), subject.environ
    )
    bad = [finding for finding in loaded if finding.status is not Status.OK]
    return [*told, *(bad or loaded)]


def _question(folder: Path, digests: TokenizerDigests) -> dict[str, str]:
    return {"folder": str(folder), "chat_template": digests.chat_template.hex()}


def _pinned(subject: Subject) -> list[Finding]:
    """Machines fetch for themselves, days apart: without a revision they may get another one."""
    policy = subject.shared.policy
    if subject.backend == "local" or policy.revision or Path(policy.model).is_dir():
        return []
    fix = "set policy.revision to a commit of the hub"
    return [warn("policy.revision is not set: each machine takes what is newest then", fix)]
