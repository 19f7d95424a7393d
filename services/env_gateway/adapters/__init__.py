"""One backend each: Fleet, OpenEnv, MCP, embedded apps."""
