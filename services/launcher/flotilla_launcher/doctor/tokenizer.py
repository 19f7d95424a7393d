"""Probe of the tokenizer: learner and rollout turn the same messages into the same token ids."""

import json
from pathlib import Path

from flotilla_common.weights.fingerprint import tokenizer_digests
from flotilla_launcher.doctor.findings import Finding, Status, UnprobedError, fail, ok, warn
from flotilla_launcher.doctor.policy_files import fetch_policy_folder
from flotilla_launcher.doctor.probe_process import run_probe_module
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import ROLLOUT


async def probe_tokenizer(context: RunContext) -> list[Finding]:
    """Compare both sides: the learner relies on digests of the files, rollouts on the tokenizer
    that transformers loads."""
    try:
        folder = await fetch_policy_folder(context)
        digests = tokenizer_digests(folder)
        second = _check_second_template(folder)
    except FileNotFoundError:
        fix = (
            "choose a model with a fast tokenizer, or save one: AutoTokenizer(...).save_pretrained"
        )
        return [fail(f"{context.shared.policy.model} has no tokenizer.json", fix)]
    except ValueError as error:
        return [fail(f"tokenizer_config.json is no JSON: {error}", "fetch the model again")]
    findings = [ok(f"digest {digests.whole.hex()[:16]}"), *second]
    try:
        python = context.find_interpreter("tokenizers", "transformers")
    except UnprobedError as error:
        return [*findings, error.finding]
    module = "flotilla_launcher.doctor.adapters.tokenizer_probe"
    question = {
        "folder": str(folder),
        "chat_template": digests.chat_template.hex(),
        "replaced": _replaces_template(context),
    }
    loaded = await run_probe_module(python, module, question, context.environ)
    bad = [finding for finding in loaded if finding.status is not Status.OK]
    return [*findings, *(bad or loaded)]


def _replaces_template(context: RunContext) -> bool:
    if ROLLOUT not in context.plan.services:
        return False
    return bool(context.get_section(ROLLOUT)["dialect"]["chat_template"])


def _check_second_template(folder: Path) -> list[Finding]:
    """Warn of a second chat template. Both sides take chat_template.jinja if there is one;
    other tools may take the other."""
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
