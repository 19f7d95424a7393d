"""FleetTaskEnv of Fleet's OpenEnv fork, each in its own process."""
