"""Number of examples that a property is tested with."""

from hypothesis import HealthCheck, settings

QUICK = "quick"
_QUICK_SHARE = 4


def examples(count: int) -> int:
    """Return `count`, or a quarter of it in the quick tests (`--hypothesis-profile=quick`)."""
    return count // _QUICK_SHARE if settings.get_current_profile_name() == QUICK else count


def register_profiles() -> None:
    """Register the profile of quick tests; properties that name no count draw a quarter, too.

    The first text that is drawn may build the tables of Unicode, and four processes share two
    cores: in both profiles, slow says nothing of a test."""
    patient = settings(
        settings.get_profile("default"),
        suppress_health_check=[HealthCheck.too_slow],
        deadline=None,
    )
    settings.register_profile("default", patient)
    settings.load_profile("default")
    settings.register_profile(QUICK, patient, max_examples=patient.max_examples // _QUICK_SHARE)
