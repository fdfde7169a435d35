"""Tools of MCP servers (modelcontextprotocol.io)."""

from __future__ import annotations

from midflight.tools.mcp.connection import McpConnection, McpServer, McpTool, connect

__all__ = ["McpConnection", "McpServer", "McpTool", "connect"]
