"""Every probe is tried with a fault that it has to report, and most faults are more than a variable
that is not set."""

import ast
from pathlib import Path

from flotilla_launcher.doctor.probe_list import PROBES

FOLDER = Path(__file__).parent
FAULTS, MISSING_VARIABLES = 15, 3


def faults() -> list[tuple[str, set[str], bool]]:
    """Each test in which a probe fails: its name, the probes, and whether a variable is not
    set. Parameters count as one."""
    found: list[tuple[str, set[str], bool]] = []
    for path in sorted(FOLDER.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                continue
            source = ast.get_source_segment(text, node) or ""
            probes = _probed(node)
            if probes and node.name.startswith("test_") and "Status.FAIL" in source:
                found.append((node.name, probes, "not set" in source))
    return found


def _probed(test: ast.AST) -> set[str]:
    """First arguments of `probed`."""
    return {
        str(call.args[0].value)
        for call in ast.walk(test)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "probed"
        and isinstance(call.args[0], ast.Constant)
    }


def test_every_probe_names_a_fault_and_few_of_them_are_missing_variables() -> None:
    planted = faults()
    assert len(planted) >= FAULTS
    assert set[str]().union(*(probes for _, probes, _ in planted)) == {p.name for p in PROBES}
    assert sum(missing for *_, missing in planted) <= MISSING_VARIABLES, planted
