"""MCP servers, over streamable HTTP and stdio."""
