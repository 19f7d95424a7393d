"""Conversion between Protobuf and the messages of agents and launcher."""

from collections.abc import Mapping

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from services.launcher.agent_protocol import ReplicaCommand, UnitPhase

COMMANDS: Mapping[ReplicaCommand, "registry_pb.Command.ValueType"] = {
    command: registry_pb.Command.Value(f"COMMAND_{command.name}") for command in ReplicaCommand
}
PHASES: Mapping[UnitPhase, "registry_pb.UnitPhase.ValueType"] = {
    phase: registry_pb.UnitPhase.Value(f"UNIT_PHASE_{phase.name}") for phase in UnitPhase
}


def command_from_pb(wire: "registry_pb.Command.ValueType") -> ReplicaCommand:
    """Read a command. An unknown one, from a newer launcher, is NONE."""
    known = {value: key for key, value in COMMANDS.items()}
    return known.get(wire, ReplicaCommand.NONE)


def phase_from_pb(wire: "registry_pb.UnitPhase.ValueType") -> UnitPhase:
    """Read a phase. An unknown one, from a newer agent, is RUNNING."""
    known = {value: key for key, value in PHASES.items()}
    return known.get(wire, UnitPhase.RUNNING)
