"""The card of a published model: what it is, how well it did, and how to make it again. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla_reading.analysis.documents import render_markdown
from flotilla_reading.analysis.sections import Section
from flotilla_reading.report.run_facts import ReportedRun
from flotilla_reading.report.sections import build_card_sections

_TAGS = ("flotilla", "reinforcement-learning", "tool-use")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the run's files do not tell: the published checkpoint, the name of its base model on
    the hub ("" if it has none), its licence by the hub's identifiers, whether only `adapters` are
    published, and the versions of installed libraries."""

    step: int
    base_model: str
    licence: str
    libraries: Mapping[str, str]
    written_by: str
    adapters: bool = False


def write_card(run: ReportedRun, facts: CardFacts) -> str:
    """Return the card as Markdown with the hub's metadata. The run's spec is without secrets."""
    head: dict[str, Any] = {
        "license": facts.licence,
        "library_name": "peft" if facts.adapters else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(_TAGS),
    }
    if facts.base_model:
        head["base_model"] = facts.base_model
    # A JSON value is one of YAML, too, whatever is in it.
    lines = [f"{name}: {json.dumps(value)}" for name, value in head.items()]
    # What the run did after the checkpoint is not the model's.
    run = replace(
        run,
        evals=[each for each in run.evals if each.step <= facts.step],
        rewards={step: each for step, each in run.rewards.items() if step <= facts.step},
    )
    page = render_markdown(
        f"{run.run_id}, step {facts.step}", _list_sections(run, facts), facts.written_by
    )
    return "\n".join(["---", *lines, "---", "", page])


def _list_sections(run: ReportedRun, facts: CardFacts) -> Sequence[Section]:
    what = "Adapters (LoRA) of" if facts.adapters else "The weights of"
    base = facts.base_model or "a model of its own"
    text = (
        f"{what} {base}, trained by Flotilla on tasks with tools; the run {run.run_id} after"
        f" {facts.step} optimizer steps. Licence: {facts.licence}."
    )
    return [Section("What it is", text), *build_card_sections(run, facts.libraries)]
