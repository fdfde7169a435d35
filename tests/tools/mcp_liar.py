"""An MCP server that breaks the protocol as its argument says."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FAULT = sys.argv[1]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


if FAULT == "import":
    key = os.environ.get("LIAR_KEY", "")
    print(
        "x" * 20_000,
        "Traceback (most recent call last):",
        f"ImportError: \x1b[31mno module {key}\n",
        sep="\n",
        file=sys.stderr,
    )
    sys.exit(3)
for line in sys.stdin:
    asked = json.loads(line)
    number, method = asked.get("id"), asked.get("method")
    if number is None:
        continue
    if method == "initialize":
        version = {"protocolVersion": asked["params"]["protocolVersion"], "serverInfo": {"name": "l", "version": "1"}}
        send({"id": number, "result": {**version, "capabilities": {"tools": {}}}})
    elif method == "tools/list":
        schema = {"type": "banana"} if FAULT == "schema" else SCHEMA
        names = [f"t{count}" for count in range(501)] if FAULT == "many" else [] if FAULT == "odd" else ["go"]
        tools = [{"name": name, "description": "d", "inputSchema": schema} for name in names]
        if FAULT == "output":
            tools[0]["outputSchema"] = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"\p{L}"}}}
        send({"id": number, "result": {"tools": [*tools, *json.loads(os.environ.get("LIAR_TOOLS", "[]"))]}})
    elif method == "tools/call" and FAULT == "dies":
        print("no room left", file=sys.stderr, flush=True)
        os._exit(1)
    elif method == "tools/call":
        if FAULT == "prints":
            print("debug\n\x00 sk-secret-1234", flush=True)
        text = {"half": "\ud800"}.get(FAULT, "fine")
        content = "zzz" if FAULT == "result" else [{"type": "text", "text": text}]
        structured = {"structuredContent": {"a": "b"}} if FAULT == "output" else {}
        send({"id": number, "result": {"content": content, **structured}})
    else:
        send({"id": number, "error": {"code": -32601, "message": "no such method"}})
