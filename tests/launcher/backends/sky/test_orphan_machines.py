"""A machine with our prefix that SkyPilot does not know is an orphan."""

from flotilla_launcher.backends.sky.orphan_machines import BilledMachine, find_orphans


def test_machines_of_clusters_that_skypilot_knows_and_of_others_are_no_orphans() -> None:
    machines = [
        BilledMachine(str(number), name)
        for number, name in enumerate(("ours-1-head", "ours-2-head", "ours-12-head", "theirs"))
    ]
    found = find_orphans(machines, lambda name: name.startswith("ours-"), {"ours-1"})
    assert [machine.name for machine in found] == ["ours-2-head", "ours-12-head"]
