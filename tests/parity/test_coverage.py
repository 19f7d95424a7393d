"""Nothing of the mathematics is without a peer or a named closed form."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.losses import LOSSES
from flotilla_learner.algo.reductions import REDUCTIONS
from flotilla_learner.config.algorithm import CorrectionConfig, KlConfig
from tests.parity import test_advantages, test_losses, test_step, test_terms
from tests.parity.support import CASES, PEERS

HERE = Path(__file__).parent
# What no peer has, and the test that holds it against its formula.
CLOSED_FORMS = {
    "staleness_decay": "tests/learner/algo/test_corrections.py",
}
CLOSED_ADVANTAGES = {
    "mt_grpo": "tests/learner/algo/test_advantages.py",
}
COMPARED = {
    "loss": {
        *test_losses.LOSSES,
        *test_losses.GRADIENTS,
        *test_losses.EXTREMES,
        *test_losses.DRAWN,
    },
    "advantage": {
        *test_advantages.OUTCOMES,
        *test_advantages.TOKENS,
        *test_advantages.GROUPED,
        *test_advantages.NAMED,
    },
    "kl": {
        *test_terms.ESTIMATED,
        *test_terms.KL_LOSSES,
        *(f"reward_{name}" for name in test_terms.ESTIMATORS),
    },
    "reduction": {f"{name}{suffix}" for name in test_terms.REDUCED for suffix in ("", ":parts")},
    "correction": {*test_terms.CORRECTIONS, *test_losses.CORRECTED},
    "entropy": {"mean"},
    "value": {"clipped", "clipped_sequence_mean"},
    "overlong": {"soft", "soft_half"},
    "step": set(test_step.STEPS),
}


def names_of_this_project(names: Iterable[str], get: Callable[[str], Any]) -> set[str]:
    """Without what the tests of plugins may have registered."""
    return {name for name in names if get(name).__module__.startswith("flotilla_learner.algo")}


def settings_with_a_peer() -> list[dict[str, Any]]:
    """The tables of `[learner.algorithm]` that some case of the fixtures is compared under."""
    losses = {**test_losses.LOSSES, **test_losses.GRADIENTS}
    tables = [*losses.items(), *test_losses.CORRECTED.items()]
    found = {case.name for case in CASES}
    return [settings for name, settings in tables if name in found]


def test_every_loss_has_a_peer() -> None:
    known = names_of_this_project(LOSSES.names, LOSSES.get)
    assert known == {settings["loss"] for settings in settings_with_a_peer()}


def test_every_advantage_has_a_peer_or_a_closed_form() -> None:
    tables = {
        **test_advantages.OUTCOMES,
        **test_advantages.TOKENS,
        **test_advantages.GROUPED,
        **test_advantages.NAMED,
    }
    compared = {tables[case.name] for case in CASES if case.name in tables}
    known = names_of_this_project(ADVANTAGES.names, ADVANTAGES.get)
    assert known == compared | set(CLOSED_ADVANTAGES)
    for name, place in CLOSED_ADVANTAGES.items():
        assert f"test_{name}" in (HERE.parents[1] / place).read_text()


def test_every_reduction_has_a_peer() -> None:
    assert set(REDUCTIONS) == set(test_terms.REDUCED.values())
    assert set(test_terms.REDUCED) <= {case.name for case in CASES if case.term == "reduction"}


def test_every_estimate_of_kl_has_a_peer_in_the_loss_and_in_the_reward() -> None:
    known = set(get_args(KlConfig.model_fields["estimator"].annotation))
    compared = {case.name for case in CASES if case.term == "kl"}
    assert known == set(test_terms.ESTIMATORS)
    assert known | {f"reward_{name}" for name in known} <= compared


def test_every_correction_has_a_peer_or_a_closed_form() -> None:
    compared = {case.name for case in CASES if case.term == "correction"}
    with_peer = {
        option
        for name, options in test_terms.CORRECTIONS.items()
        if name in compared
        for option in options
    }
    assert set(CorrectionConfig.model_fields) == with_peer | set(CLOSED_FORMS)
    for option, place in CLOSED_FORMS.items():
        assert option in (HERE.parents[1] / place).read_text()


def test_every_case_is_compared_or_a_named_difference() -> None:
    differences = (HERE / "test_differences.py").read_text()
    for case in CASES:
        named = f'"{case.name}"' in differences
        assert case.name in COMPARED[case.term] or named, (case.peer, case.term, case.name)


def test_every_case_names_the_release_that_the_requirements_pin() -> None:
    pins = {
        peer: re.findall(
            rf"^{peer}==(\S+) \\$", (HERE / f"requirements-{peer}.txt").read_text(), re.MULTILINE
        )
        for peer in PEERS
    }
    # It is not on PyPI, but in git.
    pins["prime_rl"] = re.findall(
        r'^COMMIT = "(\w{40})"$', (HERE / "make_prime_rl.py").read_text(), re.MULTILINE
    )
    for case in CASES:
        assert [case.version] == pins[case.peer], case
        assert case.function.startswith(f"{case.peer}."), case


def test_the_fixtures_stay_small() -> None:
    assert sum(path.stat().st_size for path in (HERE / "fixtures").glob("*.json")) < 300_000
