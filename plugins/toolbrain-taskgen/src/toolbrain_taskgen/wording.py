"""Queries for plans: by a language model, or by templates over the tools' own descriptions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolbrain_core.roles import ChatModel, ChatRequest
from toolbrain_core.traces import ToolCall, ToolSpec

from .planning import literals

_QUESTIONS = ("how", "what", "which", "where", "when", "who", "whether")
#: First words of descriptions that say only that something is returned.
_RETURNING = re.compile(
    r"^(?:gets?|returns?|fetch(?:es)?|retrieves?|computes?|calculates?|looks? up|finds?|gives?|"
    r"determines?|shows?|tells?)\s+",
    re.I,
)
#: First words of descriptions that tell to do something else.
_DOING = re.compile(
    r"^(?:adds?|subtracts?|multipl(?:y|ies)|divides?|converts?|translates?|counts?|checks?|sums?|sorts?|"
    r"joins?|splits?|reverses?|rounds?|estimates?|compares?|searche?s?|lists?|picks?|selects?|combines?|"
    r"formats?|parses?|encodes?|decodes?|measures?|ranks?|merges?|reads?|solves?|evaluates?)\b",
    re.I,
)
_OF_NOUNS = (
    "What is {what}{of}?",
    "Tell me {what}{of}.",
    "I need to know {what}{of}.",
    "Find out {what}{of}.",
)
_OF_QUESTIONS = ("I want to know {what}{of}.", "Tell me {what}{of}.", "Find out {what}{of}.")
_OF_ACTIONS = ("Please {what}{of}.", "I need you to {what}{of}.", "Could you {what}{of}?")

_INSTRUCTION = """\
Write the request of a person who wants what this plan of function calls computes.
Use everyday words. Name every value exactly as it is written. Never name a function, a parameter \
or the plan. Write the request only, in one or two sentences.
{about}{order}
Functions:
{tools}
Plan:
{plan}
Values to name: {values}
"""


def template_query(
    calls: Sequence[ToolCall], tools: Mapping[str, ToolSpec], random: random.Random
) -> str:
    """The plan in the words of the tools' descriptions, every value named."""
    steps = [call for call in calls if call.name != "final_answer"]
    answer = calls[-1] if calls[-1].name == "final_answer" else None
    if answer is None:
        return _sentence(steps[-1], {c.id: c for c in steps}, tools, random)
    parts = [f"({i}) {_part(call, {}, tools)}" for i, call in enumerate(steps, 1)]
    opening = random.choice(("I want to know", "Tell me", "Find out"))
    return f"{opening} {'; '.join(parts)}. Answer with a list of the results in this order."


def written_query(
    writer: ChatModel,
    calls: Sequence[ToolCall],
    tools: Mapping[str, ToolSpec],
    retries: int,
    about: str = "",
) -> str | None:
    """What `writer` makes of the plan, for an agent that is `about` something; None where every try
    lost a value or named a tool."""
    steps = [call for call in calls if call.name != "final_answer"]
    ordered = (
        "Ask for the results as a list, in the order of the plan."
        if len(calls) > len(steps)
        else ""
    )
    used = [tools[name] for name in dict.fromkeys(call.name for call in steps)]
    text = _INSTRUCTION.format(
        about=f"The person talks to an assistant for this: {about}\n" if about else "",
        order=ordered,
        tools="\n".join(f"- {tool.name}: {tool.description}" for tool in used),
        plan="\n".join(f"{c.id} = {c.name}({json.dumps(dict(c.arguments))})" for c in steps),
        values=", ".join(said(value) for value in literals(calls)),
    )
    for attempt in range(retries + 1):
        request = ChatRequest(
            ({"role": "user", "content": text},),
            max_tokens=120,
            temperature=0.7 if attempt else None,
        )
        query = " ".join(writer.chat(request).text.split())
        if query and not problem_of(query, calls, tools):
            return query
    return None


def problem_of(query: str, calls: Sequence[ToolCall], tools: Mapping[str, ToolSpec]) -> str:
    """What is wrong with a written query, in words: a value that it lost, a tool that it names (by
    a name like `find_city` or `findCity`: a query about prices may say "price")."""
    for value in literals(calls):
        if not names(query, value):
            return f"it does not name {said(value)}"
    for name in tools:
        is_a_word = name.isalpha() and name.islower()
        if name in query and not is_a_word:
            return f"it names the tool {name}"
    return ""


def names(query: str, value: Any) -> bool:
    """Whether a query holds a value, as a word of its own; true and false go without saying."""
    if isinstance(value, bool):
        return True
    return re.search(rf"(?<![\w.]){re.escape(said(value))}(?!\w|\.\d)", query, re.I) is not None


def said(value: Any) -> str:
    """A scalar as a query says it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _sentence(
    call: ToolCall,
    others: Mapping[str, ToolCall],
    tools: Mapping[str, ToolSpec],
    random: random.Random,
) -> str:
    what, of, kind = _filled(call, others, tools)
    templates = {"noun": _OF_NOUNS, "question": _OF_QUESTIONS, "action": _OF_ACTIONS}[kind]
    return random.choice(templates).format(what=what, of=of)


def _part(call: ToolCall, others: Mapping[str, ToolCall], tools: Mapping[str, ToolSpec]) -> str:
    what, of, kind = _filled(call, others, tools)
    return f"{'the result when you ' if kind == 'action' else ''}{what}{of}"


def _filled(
    call: ToolCall, others: Mapping[str, ToolCall], tools: Mapping[str, ToolSpec]
) -> tuple[str, str, str]:
    """The description with the arguments in the places of what they are called ("one item", "the
    city"), the arguments that found no place, and the kind of the description."""
    what, kind = _described(tools[call.name])
    rest = []
    for name, value in call.arguments.items():
        word, text = re.escape(name.replace("_", " ")), _argument(value, others, tools)
        place = re.compile(rf"\b(?:one|an?|the|this|that|(?:the |a )?given)\s+{word}\b", re.I)
        filled = place.sub(lambda _, text=text: text, what, count=1)
        if filled == what:
            rest.append(f"{name.replace('_', ' ')} {text}")
        what = filled
    return what, f" for {_listed(rest)}" if rest else "", kind


def _described(tool: ToolSpec) -> tuple[str, str]:
    """A description's first sentence as a noun phrase, an indirect question or an action."""
    text = tool.description.strip() or tool.name.replace("_", " ")
    sentence = re.split(r"(?<=[a-z0-9)])[.!?](?:\s|$)|\n", text)[0].strip(" .:")
    bare = _RETURNING.sub("", sentence)
    first = bare.split()[0] if bare.split() else ""
    lowered = bare if first[1:] != first[1:].lower() else bare[:1].lower() + bare[1:]
    if first.lower() in _QUESTIONS:
        return lowered, "question"
    if bare == sentence and _DOING.match(sentence):
        verb, _, rest = lowered.partition(" ")
        return f"{_plain_verb(verb)} {rest}", "action"
    return lowered if first.lower() in {"the", "a", "an"} else f"the {lowered}", "noun"


def _plain_verb(verb: str) -> str:
    """ "converts" as "convert"."""
    for ending, plain in (("ies", "y"), ("ches", "ch"), ("sses", "ss"), ("s", "")):
        if verb.endswith(ending) and not verb.endswith("ss"):
            return verb.removesuffix(ending) + plain
    return verb


def _argument(value: Any, others: Mapping[str, ToolCall], tools: Mapping[str, ToolSpec]) -> str:
    if isinstance(value, Mapping) and set(value) == {"$result"}:
        return _part(others[value["$result"]], others, tools)
    if isinstance(value, Mapping):
        return _listed([f"{key} {_argument(item, others, tools)}" for key, item in value.items()])
    if isinstance(value, list | tuple):
        return _listed([_argument(item, others, tools) for item in value])
    return said(value)


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
