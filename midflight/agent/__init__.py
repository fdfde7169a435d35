"""The agent: planner, executor, verifier and generator around one memory. Read `flow.py` first."""

from midflight.agent.actions import planner_grammar
from midflight.agent.executor import DirectExecutor, Execution, Executor, LLMExecutor
from midflight.agent.flow import AgentFlow, NotReplayable
from midflight.agent.generator import Generated, Generator, LastResultGenerator, LLMGenerator
from midflight.agent.memory import Memory
from midflight.agent.planner import Analyst, LLMAnalyst, LLMPlanner, Plan, Planner
from midflight.agent.types import (
    Action,
    Answer,
    Claim,
    ErrorKind,
    Generation,
    Query,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
)
from midflight.agent.verifier import LLMVerifier, RuleVerifier, Verification, Verifier

__all__ = [
    "Action",
    "AgentFlow",
    "Analyst",
    "Answer",
    "Claim",
    "DirectExecutor",
    "ErrorKind",
    "Execution",
    "Executor",
    "Generated",
    "Generation",
    "Generator",
    "LLMAnalyst",
    "LLMExecutor",
    "LLMGenerator",
    "LLMPlanner",
    "LLMVerifier",
    "LastResultGenerator",
    "Memory",
    "NotReplayable",
    "Plan",
    "Planner",
    "Query",
    "RuleVerifier",
    "StopReason",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "Verdict",
    "Verification",
    "Verifier",
    "planner_grammar",
]
