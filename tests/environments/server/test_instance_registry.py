import pytest

from flotilla_environments.server.instance_registry import (
    MAX_STOPPED,
    InstanceLimitError,
    InstanceRecord,
    InstanceRequest,
    Registry,
)


def wanted(
    ttl: float = 10.0, heartbeat: float | None = None, request: str | None = None
) -> InstanceRequest:
    return InstanceRequest(
        "shop",
        "train-000000",
        "v1",
        ttl=ttl,
        run_id="run",
        heartbeat_interval=heartbeat,
        request_id=request,
    )


def reasons(records: list[InstanceRecord]) -> list[str | None]:
    return [record.stop_reason for record in records]


def test_an_instance_stops_at_its_ttl_or_without_its_heartbeat() -> None:
    registry = Registry(max_running=10)
    records = [
        registry.create_instance(wanted(10), 0),
        registry.create_instance(wanted(100, heartbeat=5), 0),
    ]
    registry.stop_expired(4.9)
    assert reasons(records) == [None, None]
    records[1].heartbeat_at = 4.9
    registry.stop_expired(9.8)
    assert reasons(records) == [None, None]
    registry.stop_expired(10.0)
    assert reasons(records) == ["ttl", "heartbeat"]
    assert len(registry) == 0


def test_a_limit_is_kept_and_room_frees_up() -> None:
    registry = Registry(max_running=1)
    first = registry.create_instance(wanted(), 0)
    with pytest.raises(InstanceLimitError):
        registry.create_instance(wanted(), 0)
    registry.stop_instance(first, "deleted")
    registry.stop_instance(first, "again")
    assert first.stop_reason == "deleted"
    registry.create_instance(wanted(), 0)


def test_a_failed_create_leaves_nothing_behind() -> None:
    registry = Registry(max_running=1)
    with pytest.raises(ValueError, match="not found"):
        registry.create_instance(InstanceRequest("shop", "nothing", "v1", ttl=1, request_id="r"), 0)
    assert len(registry) == 0
    assert registry.created_by("r") is None


def test_what_is_remembered_of_stopped_instances_is_bounded() -> None:
    registry = Registry(max_running=1)
    for index in range(MAX_STOPPED + 5):
        registry.stop_instance(registry.create_instance(wanted(request=str(index)), 0), "deleted")
    assert len(list(registry.all_records())) == MAX_STOPPED
    assert registry.created_by("4") is None
    assert registry.created_by("5") is not None
