"""Probe of the dialect: the rollout's own rehearsal of how the policy is written to and read."""

import asyncio
import json
from pathlib import Path
from typing import Any

from services.common.python_command import python_command
from services.launcher.doctor.findings import (
    Finding,
    NotApplicableError,
    fail,
    first_line,
    ok,
    warn,
)
from services.launcher.doctor.policy_files import (
    NoPolicyError,
    fetch_policy_folder,
    reads_text_alone,
)
from services.launcher.doctor.probe_process import run_command
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import ROLLOUT

# It prints what is wrong, or nothing.
_REHEARSAL = """
import json, sys
from pathlib import Path
from services.common.adapters.hidden_torch import hide_torch

asked = json.load(sys.stdin)
if asked["text_only"]:
    hide_torch()
from services.common.errors import ConfigError
from services.common.spec import PolicyConfig
from services.rollout.adapters.model_files import read_model_folder
from services.rollout.config.rollout import DialectConfig

policy, dialect = PolicyConfig(**asked["policy"]), DialectConfig(**asked["dialect"])
try:
    read_model_folder(Path(asked["folder"]), policy, dialect)
except ConfigError as error:
    print(json.dumps(str(error)))
else:
    print(json.dumps(""))
"""
_FIX = "docs/models.md says what each family of models is played by, and what is refused"


async def probe_dialect(context: RunContext) -> list[Finding]:
    """Rehearse the dialect before an engine is loaded anywhere: `--check-config` does so for a
    model in a folder alone."""
    dialect = context.get_section(ROLLOUT)["dialect"]
    policy = context.shared.policy
    if policy.trust_remote_code and not await asyncio.to_thread(Path(policy.model).is_dir):
        raise NotApplicableError(f"{policy.model} brings code of its own, which workers alone run")
    try:
        folder = await fetch_policy_folder(context)
    except NoPolicyError as error:
        # The probe `model` or `tokenizer` reports it.
        raise NotApplicableError(str(error)) from error
    # vLLM's parsers come with vLLM.
    needed = ("vllm",) if dialect["parser"] else ()
    python = context.find_interpreter("tokenizers", "transformers", "renderers", *needed)
    question = {
        "folder": str(folder.resolve()),
        "policy": policy.model_dump(mode="json"),
        "dialect": dialect,
        "text_only": reads_text_alone(context),
    }
    return [await _rehearse(context, python, question)]


async def _rehearse(context: RunContext, python: str, question: dict[str, Any]) -> Finding:
    command = python_command("-c", _REHEARSAL, executable=python)
    code, output, errors = await run_command(
        command, json.dumps(question).encode(), context.environ
    )
    if code != 0:
        last = first_line("\n".join(reversed(errors.strip().splitlines())))
        what = f"not rehearsed: the rollout's functions ended with code {code}: {last}"
        return warn(what, "see whether the rollout's environment is whole")
    wrong = json.loads(output.strip().splitlines()[-1])
    if wrong:
        return fail(wrong, _FIX)
    return ok(f"{context.shared.policy.model} is read as it is written to")
