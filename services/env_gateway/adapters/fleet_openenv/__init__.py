"""FleetTaskEnv of Fleet's OpenEnv fork, each in a process of its own."""
