"""Teach a planner to use a tool of yours."""

from midflight import solve, train_on
from midflight.tasks.base import Task
from midflight.tools import tool

STOCK = {"bolts": 120, "nuts": 75, "screws": 310, "nails": 42, "hinges": 18, "locks": 9, "hooks": 64, "clamps": 27}


@tool
def stock(item: str) -> int:
    """How many of an item are in the warehouse."""
    return STOCK[item.strip().lower()]


tasks = [Task(id=item, question=f"How many {item} do we have?", answer=str(count)) for item, count in STOCK.items()]

plain = ["model.chat_template=false", "agent.grounded=true"]  # suits a small model: quote the question in tool calls
train_on(tasks[:5], [stock], eval_tasks=tasks[5:], steps=5, run_dir="runs/stock", overrides=plain)
print(solve("How many locks do we have?", "runs/stock", tools=[stock]).answer)
print("Try: midflight report runs/stock")
