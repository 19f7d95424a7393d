import pytest

from tests.tinker.api.conftest import ServedDesk

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_client_gets_its_configuration_and_a_session(served: ServedDesk) -> None:
    config = await served.post("/client/config", sdk_version="0.38.0")
    flags = await served.post("/client/dynamic_config", sdk_version="0.38.0")
    session = await served.post(
        "/create_session",
        tags=["a"],
        user_metadata={"recipe": "rl"},
        sdk_version="0.38.0",
        type="create_session",
    )

    assert config.json() == {}
    assert flags.json() == {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
    assert session.json() == {"type": "create_session", "session_id": "s1"}
    (facts,) = served.desk.sessions
    assert facts["user_metadata"] == {"recipe": "rl"}
    assert (facts["tags"], facts["sdk_version"]) == (["a"], "0.38.0")


async def test_a_finished_session_ends_its_heartbeats(served: ServedDesk) -> None:
    alive = await served.post("/session_heartbeat", session_id="s1", type="session_heartbeat")
    finished = await served.post("/sessions/s1/finish", reason={"type": "success"}, detail=None)
    late = await served.post("/session_heartbeat", session_id="s1")

    assert alive.json() == {"type": "session_heartbeat"}
    assert finished.status_code == 200
    assert (late.status_code, late.json()) == (410, {"detail": "the session s1 has finished"})


async def test_sessions_are_listed_with_their_models(served: ServedDesk) -> None:
    assert (await served.get("/sessions", limit=10)).json() == {"sessions": ["s1"]}
    found = (await served.get("/sessions/s1")).json()
    assert found == {"training_run_ids": ["s1:train:0"], "sampler_ids": []}
    assert (await served.get("/sessions/s9")).status_code == 404


async def test_the_models_and_their_windows_are_told(served: ServedDesk) -> None:
    answer = await served.get("/get_server_capabilities")

    (model,) = answer.json()["supported_models"]
    assert model == {
        "model_name": "tiny/model",
        "max_context_length": 48,
        "trainable": True,
        "sampleable": True,
    }


async def test_events_of_the_sdk_are_accepted(served: ServedDesk) -> None:
    answer = await served.post("/telemetry", events=[{"event": "x"}], session_id="s1")

    assert answer.json() == {"status": "accepted"}
