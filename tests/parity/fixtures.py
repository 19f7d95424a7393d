"""Fixtures: what a peer's release makes of given inputs, every float exactly as it came out.

Written in the peer's own environment (make_*.py), so nothing here imports more than Python.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "fixtures"


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a peer's function."""

    # advantage, loss, kl, reduction, correction, entropy, value, overlong or step.
    term: str
    name: str
    peer: str
    version: str
    # Dotted path of the function called.
    function: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]


@dataclass(slots=True)
class Recorder:
    """Collects the cases of one peer. Inputs that several cases share are written once."""

    peer: str
    version: str
    inputs: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    cases: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def add(
        self,
        term: str,
        name: str,
        function: str,
        inputs: str,
        outputs: Mapping[str, Any],
        **settings: Any,
    ) -> None:
        """Records a call; `inputs` is the name of the inputs that it was given."""
        if inputs not in self.inputs:
            raise KeyError(f"case {term}/{name}: no inputs named {inputs!r}")
        case = Case(term, name, self.peer, self.version, function, settings, {}, outputs)
        self.cases.append(asdict(case) | {"inputs": inputs})

    def write(self) -> Path:
        path = _FOLDER / f"{self.peer}.json"
        lines = ",\n".join(json.dumps(case, allow_nan=False) for case in self.cases)
        shared = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self.inputs.items()
        )
        path.write_text(f'{{"inputs": {{\n{shared}\n}},\n"cases": [\n{lines}\n]}}\n')
        return path


def load(peer: str) -> list[Case]:
    """Every case of a peer, its inputs in place of their name."""
    content = json.loads((_FOLDER / f"{peer}.json").read_text())
    return [
        Case(**(case | {"inputs": content["inputs"][case["inputs"]]})) for case in content["cases"]
    ]
