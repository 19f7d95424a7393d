"""The launcher's gRPC services: RunService for people, RegistryService for replicas and agents."""
