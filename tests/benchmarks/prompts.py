"""Token ids to measure with: English prose and code, of any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEXT = Path(__file__).parents[2] / "docs" / "explanation" / "design.md"

#: Tokens that the environment adds after each turn of a conversation but the last.
OBSERVATION = 40


def text_ids(tokenizer: Any, length: int, start: int = 0) -> list[int]:
    """`length` ids of the text from its token `start` on, which begins again at its end."""
    ids = tokenizer(_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return [ids[place % len(ids)] for place in range(start, start + length)]


def prompt_ids(tokenizer: Any, length: int, repeat: int) -> list[int]:
    """A prompt that shares no prefix with that of another repeat: no cache can help."""
    first = 1000 + repeat  # any ordinary tokens
    return [first, *text_ids(tokenizer, length - 1, start=101 * repeat)]


def observation_ids(tokenizer: Any, attempt: int, turn: int) -> list[int]:
    """What the environment says after a turn of one attempt."""
    return text_ids(tokenizer, OBSERVATION, start=211 * attempt + 53 * turn)
