"""JSON encoding of a comparison, for its transfer from a rank."""

from dataclasses import asdict
from typing import Any

from services.learner.types import Comparison, Hypothesis, PositionBand, VersionMismatch

Message = dict[str, Any]


def encode_comparison(comparison: Comparison) -> Message:
    return {
        # JSON keys are strings only.
        "versions": [[version, asdict(found)] for version, found in comparison.versions.items()],
        "sequences": list(comparison.sequences),
        "bands": [asdict(band) for band in comparison.bands],
        "hypotheses": [asdict(hypothesis) for hypothesis in comparison.hypotheses],
        "experts": comparison.experts,
    }


def decode_comparison(message: Message) -> Comparison:
    return Comparison(
        versions={version: VersionMismatch(**found) for version, found in message["versions"]},
        sequences=tuple(message["sequences"]),
        bands=tuple(PositionBand(**band) for band in message["bands"]),
        hypotheses=tuple(Hypothesis(**hypothesis) for hypothesis in message["hypotheses"]),
        experts=message["experts"],
    )
