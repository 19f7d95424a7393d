"""The gateway of a command that plays episodes itself."""

from flotilla_launcher.cli.adapters.play_gateway import paid_backend

EMULATED = {"backend": "fleet", "backends": {"fleet": {"command": ["emulator"]}}}
PAID = {"backend": "embedded", "environments": {"shop": {"backend": "fleet_openenv"}}}


def test_fleet_charges_for_its_environments_and_not_for_a_server_of_the_gateway() -> None:
    assert paid_backend(PAID, "shop") == "fleet_openenv"
    assert paid_backend(PAID, "booking") == ""
    assert paid_backend(EMULATED, "shop") == ""
