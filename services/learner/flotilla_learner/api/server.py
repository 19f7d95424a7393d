"""The learner's gRPC server."""

import grpc.aio

from flotilla.learner.v1 import (
    group_service_pb2_grpc,
    policy_service_pb2_grpc,
)
from flotilla_common.rpc import rpc
from flotilla_learner.api.group_service import GroupService
from flotilla_learner.api.policy_service import PolicyService


def build_server(token: str, groups: GroupService, policies: PolicyService) -> grpc.aio.Server:
    """Build the server with its services, not started yet."""
    server = rpc.server(token=token)
    group_service_pb2_grpc.add_GroupServiceServicer_to_server(groups, server)
    policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(policies, server)
    return server
