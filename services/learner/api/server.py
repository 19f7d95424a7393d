"""The learner's gRPC server."""

import grpc.aio

from flotilla.learner.v1 import (
    group_service_pb2_grpc,
    policy_service_pb2_grpc,
    rank_service_pb2_grpc,
)
from services.common import rpc
from services.learner.api.group_service import GroupService
from services.learner.api.policy_service import PolicyService
from services.learner.api.rank_service import RankService


def build_server(
    token: str, groups: GroupService, policies: PolicyService, ranks: RankService | None
) -> grpc.aio.Server:
    """Build the server with its services, not started yet; `ranks` only with further machines."""
    server = rpc.server(token=token)
    group_service_pb2_grpc.add_GroupServiceServicer_to_server(groups, server)
    policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(policies, server)
    if ranks is not None:
        rank_service_pb2_grpc.add_RankServiceServicer_to_server(ranks, server)
    return server
