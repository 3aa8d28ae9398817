"""Prompt templates for small models."""

from __future__ import annotations

from typing import Any, Literal

# `tool.inputs` and not `to_code_prompt()`: the latter spends most of its tokens on docstrings.
_TOOLS = """\
{%- for tool in tools.values() if tool.name != "final_answer" %}
{{ tool.name }}({% for name, input in tool.inputs.items() %}{{ name }}: {{ input.type }}\
{{ ", " if not loop.last }}{% endfor %}) -> {{ tool.output_type }}: {{ tool.description.strip() }}
{%- endfor %}
{%- for agent in managed_agents.values() %}
{{ agent.name }}(task: string) -> string: {{ agent.description }}
{%- endfor %}"""

_INSTRUCTIONS = """
{%- if custom_instructions %}
{{ custom_instructions }}
{%- endif %}"""

_CODE = f"""\
Solve the task by writing Python that calls these tools:
{_TOOLS}
Answer with one code block that ends with final_answer:
{{{{ code_block_opening_tag }}}}
x = tool(...)
final_answer(x)
{{{{ code_block_closing_tag }}}}
{_INSTRUCTIONS}"""

_TOOL_CALLING = f"""\
Solve the task by calling these tools, one at a time:
{_TOOLS}
final_answer(answer: any): gives the answer and ends the task
Answer with one call as JSON and nothing else:
{{"name": "tool", "arguments": {{"name": "value"}}}}
{_INSTRUCTIONS}"""

_PLAN = (
    f"Write a short numbered plan for this task, then {{{{ '<end_plan>' }}}}.\nTools:\n{_TOOLS}\n"
)


def compact_prompts(agent_class: Literal["code", "toolcalling"] = "code") -> dict[str, Any]:
    """Prompt templates of at most 200 tokens for four tools (the stock ones take about 2,300).

    For `CodeAgent(prompt_templates=…)`, or `ToolCallingAgent` with `"toolcalling"`.

    >>> sorted(compact_prompts())
    ['final_answer', 'managed_agent', 'planning', 'system_prompt']
    """
    systems = {"code": _CODE, "toolcalling": _TOOL_CALLING}
    if agent_class not in systems:
        raise ValueError(f"agent_class must be 'code' or 'toolcalling', not {agent_class!r}")
    return {
        "system_prompt": systems[agent_class],
        "planning": {
            "initial_plan": _PLAN + "Task: {{ task }}",
            "update_plan_pre_messages": "The task: {{ task }}\nThis was done so far:",
            "update_plan_post_messages": _PLAN
            + "Task: {{ task }}\nSteps left: {{ remaining_steps }}",
        },
        "managed_agent": {
            "task": "You are {{ name }}. Your manager asks:\n{{ task }}",
            "report": "{{ name }} answers:\n{{ final_answer }}",
        },
        "final_answer": {
            "pre_messages": "No steps are left. Answer the task from what was found:",
            "post_messages": "The task: {{ task }}\nGive only the answer.",
        },
    }
