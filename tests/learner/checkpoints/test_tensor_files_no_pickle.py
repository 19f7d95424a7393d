"""No checkpoint can run code: what makes, moves and loads them knows no pickle."""

import ast
from collections.abc import Iterator

from tests.support.repository import ROOT

LEARNER = ROOT / "services/learner/flotilla_learner"
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Of torch and NumPy, by attribute.
CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}


def _refuses_pickles(call: ast.Call) -> bool:
    """Return True for `np.load(..., allow_pickle=False)`."""
    return any(ast.unparse(keyword) == "allow_pickle=False" for keyword in call.keywords)


def _pickles(tree: ast.AST) -> Iterator[str]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    harmless = {call.func for call in calls if _refuses_pickles(call)}
    for node in ast.walk(tree):
        if node in harmless:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in CALLS:
            yield ast.unparse(node)


def test_the_learner_reads_and_writes_no_pickles() -> None:
    found = {
        str(path.relative_to(LEARNER)): names
        for path in LEARNER.rglob("*.py")
        if (names := list(_pickles(ast.parse(path.read_text()))))
    }
    assert found == {}
