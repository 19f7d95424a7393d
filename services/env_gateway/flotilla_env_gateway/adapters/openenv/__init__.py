"""OpenEnv servers, over their WebSocket protocol."""
