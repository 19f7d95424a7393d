"""Probe of the dialect: the rollout's own rehearsal of how the policy is written to and read."""

import asyncio
from pathlib import Path

from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok, warn
from flotilla_launcher.doctor.policy_files import (
    NoPolicyError,
    fetch_policy_folder,
    reads_text_alone,
)
from flotilla_launcher.doctor.probe_process import ScriptError, run_script
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import ROLLOUT

# Prints the error, or an empty string.
_REHEARSAL = """
import json, sys
from pathlib import Path
from flotilla_common.adapters.hidden_torch import hide_torch

question = json.load(sys.stdin)
if question["text_only"]:
    hide_torch()
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.dialect_search import check_model_folder
from flotilla_rollout.config.rollout import DialectConfig

policy, dialect = PolicyConfig(**question["policy"]), DialectConfig(**question["dialect"])
try:
    check_model_folder(Path(question["folder"]), policy, dialect)
except ConfigError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps(""))
"""
_FIX = "docs/models.md lists the dialect of each family of models, and what is refused"


async def probe_dialect(context: RunContext) -> list[Finding]:
    """Rehearse the dialect before an engine is loaded anywhere: `--check-config` does so for a
    model in a folder alone."""
    if ROLLOUT not in context.plan.services:
        raise NotApplicableError("the run plays no episode")
    dialect = context.get_section(ROLLOUT)["dialect"]
    policy = context.shared.policy
    if policy.trust_remote_code and not await asyncio.to_thread(Path(policy.model).is_dir):
        raise NotApplicableError(f"{policy.model} brings code of its own, which workers alone run")
    try:
        folder = await fetch_policy_folder(context)
    except NoPolicyError as error:
        # The probe `model` or `tokenizer` reports it.
        raise NotApplicableError(str(error)) from error
    # vLLM's parsers come with vLLM; without it, those that might play the model are not tried.
    needed = ("vllm",) if dialect["parser"] else ()
    python = context.find_interpreter("tokenizers", "transformers", "renderers", *needed)
    question = {
        "folder": str(folder.resolve()),
        "policy": policy.model_dump(mode="json"),
        "dialect": dialect,
        "text_only": reads_text_alone(context),
    }
    try:
        wrong = await run_script(_REHEARSAL, question, context.environ, python)
    except ScriptError as error:
        what = f"not rehearsed: the rollout's functions {error}"
        return [warn(what, "check that the rollout's environment is complete")]
    if wrong:
        return [fail(wrong, _FIX)]
    return [ok(f"{policy.model} is read as it is written to")]
