"""The launcher's registry, as a process that registers there calls it."""

from flotilla_common.rpc.peer_channels import RegistryContract


def load_registry() -> RegistryContract:
    """Import the generated code, which a mere check of a spec does without."""
    from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc

    return RegistryContract(registry_service_pb2_grpc.RegistryServiceStub, registry_service_pb2)
