"""The shop's agent: an ordinary smolagents CodeAgent with short prompts, and demonstrations."""

from __future__ import annotations

from smolagents import ChatMessage, CodeAgent, LogLevel, Model, TransformersModel
from smolagents.models import MessageRole
from toolbrain_smolagents import SmolagentsAdapter, compact_prompts
from toolbrain_transformers.embedded import embedded_model_path

from toolbrain_core import Demonstration, Task
from toolbrain_core.answers import answers_match
from toolbrain_core.roles import AttemptKey
from toolbrain_core.testing.scripted import ScriptedPolicy

from .tools import TOOLS


def make_model(max_new_tokens: int = 48) -> TransformersModel:
    """The embedded model as smolagents runs it, greedy."""
    return TransformersModel(
        model_id=str(embedded_model_path()), max_new_tokens=max_new_tokens, do_sample=False
    )


class ShopAgent(CodeAgent):
    """A CodeAgent that gives up when its steps are used up.

    smolagents would ask the model once more then, for an answer without the tools. Here such an
    answer is a guess, and costs as much as the attempt.
    """

    def provide_final_answer(self, task: str) -> ChatMessage:
        return ChatMessage(MessageRole.ASSISTANT, content=None)


def make_agent(model: Model | None = None, max_steps: int = 1) -> ShopAgent:
    """An agent with the shop's tools, on the embedded model unless another is given."""
    return ShopAgent(
        tools=list(TOOLS.values()),
        model=model or make_model(),
        prompt_templates=compact_prompts(),
        max_steps=max_steps,
        verbosity_level=LogLevel.OFF,
    )


def demonstrate(agent: CodeAgent, task: Task) -> Demonstration:
    """The agent solving `task` with the task's own code: a conversation to imitate.

    The code is executed by the agent, tools and all; its model is not asked. Errors: ValueError
    where the agent's answer is not the gold answer.
    """
    opening, closing = agent.code_block_tags
    text = f"{opening}\nx = {task.metadata['code']}\nfinal_answer(x)\n{closing}"
    session = ScriptedPolicy([text]).session(AttemptKey("demonstration", 0, task.id, 0))
    trace = SmolagentsAdapter().run(agent, task, session)
    if not answers_match(trace.final_answer, task.gold_answer):
        raise ValueError(f"task {task.id}: {task.metadata['code']} gave {trace.final_answer!r}")
    return Demonstration(task, (*trace.turns[0].messages, {"role": "assistant", "content": text}))
