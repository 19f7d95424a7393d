"""Codecs between Protobuf and the messages of agents and launcher."""

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla_common.wire.enums import EnumCodec
from flotilla_launcher.agent_protocol import ReplicaCommand, UnitPhase

COMMANDS = EnumCodec(ReplicaCommand, registry_pb.Command)
PHASES = EnumCodec(UnitPhase, registry_pb.UnitPhase)
