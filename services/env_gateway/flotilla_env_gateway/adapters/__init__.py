"""Adapters of backends: Fleet, OpenEnv, MCP, embedded apps."""
