"""An agent on a server that speaks OpenAI's protocol, with a tool of yours, and many questions at once.

Usage: python examples/on_a_server.py http://127.0.0.1:8000/v1 MODEL     (a key is taken from OPENAI_API_KEY)
"""

import asyncio
import os
import sys

from midflight.agent import AgentFlow, LLMExecutor, LLMGenerator, LLMPlanner, LLMVerifier, Query, Trajectory
from midflight.engines.http import Client, Limits, Patience
from midflight.engines.openai import Endpoint, OpenAIEngine
from midflight.tools import make_toolset, tool

STOCK = {"bolts": 120, "nuts": 75, "screws": 310, "nails": 42, "hinges": 18, "locks": 9, "hooks": 64, "clamps": 27}


@tool
def stock(item: str) -> int:
    """How many of an item are in the warehouse."""
    return STOCK[item.strip().lower()]


async def ask_all(base_url: str, model: str) -> list[Trajectory]:
    client = Client(base_url, Patience(Limits(concurrency=64)), key=os.environ.get("OPENAI_API_KEY"))
    engine = OpenAIEngine("server", client, Endpoint(model))
    modules = LLMPlanner(engine), LLMExecutor(engine), LLMVerifier(engine), LLMGenerator(engine)
    flow = AgentFlow(*modules, make_toolset(["stock"], given=[stock]), max_turns=4, memory_tokens=4000)
    runs = await asyncio.gather(*(flow.run(Query(f"How many {item} do we have?")) for item in STOCK))
    used = engine.ledger.total
    print(f"{used.requests} requests, {used.prompt_tokens} prompt + {used.completion_tokens} completion tokens")
    return runs


if len(sys.argv) != 3:
    sys.exit(__doc__)
for run in asyncio.run(ask_all(*sys.argv[1:])):
    print(run.query.text, run.stop_reason, run.answer.text if run.answer else run.error)
