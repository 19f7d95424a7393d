"""The environments as OpenEnv servers, by the openenv package's own application factory."""
