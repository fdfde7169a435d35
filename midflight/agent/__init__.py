"""The agent: four modules, one memory, one loop. Read flow.py first."""

from midflight.agent.analyst import Analyst
from midflight.agent.executor import DirectExecutor, Execution, Executor, LLMExecutor
from midflight.agent.flow import AgentFlow
from midflight.agent.generator import Generated, Generator, LastResultGenerator, LLMGenerator
from midflight.agent.memory import Memory
from midflight.agent.planner import LLMPlanner, Plan, Planner
from midflight.agent.types import Action, Answer, Claim, Query, StopReason, Trajectory, Turn, Verdict
from midflight.agent.verifier import LLMVerifier, RuleVerifier, Verification, Verifier

__all__ = [
    "Action",
    "AgentFlow",
    "Analyst",
    "Answer",
    "Claim",
    "DirectExecutor",
    "Execution",
    "Executor",
    "Generated",
    "Generator",
    "LLMExecutor",
    "LLMGenerator",
    "LLMPlanner",
    "LLMVerifier",
    "LastResultGenerator",
    "Memory",
    "Plan",
    "Planner",
    "Query",
    "RuleVerifier",
    "StopReason",
    "Trajectory",
    "Turn",
    "Verdict",
    "Verification",
    "Verifier",
]
