"""Conversion between Protobuf and the messages of agents and launcher."""

from collections.abc import Mapping

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from services.launcher.agent_protocol import ReplicaCommand, UnitPhase

COMMANDS: Mapping[ReplicaCommand, "registry_pb.Command.ValueType"] = {
    ReplicaCommand.NONE: registry_pb.COMMAND_NONE,
    ReplicaCommand.DRAIN: registry_pb.COMMAND_DRAIN,
    ReplicaCommand.STOP: registry_pb.COMMAND_STOP,
}
PHASES: Mapping[UnitPhase, "registry_pb.UnitPhase.ValueType"] = {
    UnitPhase.SETUP: registry_pb.UNIT_PHASE_SETUP,
    UnitPhase.RUNNING: registry_pb.UNIT_PHASE_RUNNING,
    UnitPhase.PREEMPTED: registry_pb.UNIT_PHASE_PREEMPTED,
    UnitPhase.EXITED: registry_pb.UNIT_PHASE_EXITED,
}


def command_from_pb(wire: "registry_pb.Command.ValueType") -> ReplicaCommand:
    """Read a command. An unknown one, from a newer launcher, is NONE."""
    known = {value: key for key, value in COMMANDS.items()}
    return known.get(wire, ReplicaCommand.NONE)


def phase_from_pb(wire: "registry_pb.UnitPhase.ValueType") -> UnitPhase:
    """Read a phase. An unknown one, from a newer agent, is RUNNING."""
    known = {value: key for key, value in PHASES.items()}
    return known.get(wire, UnitPhase.RUNNING)
