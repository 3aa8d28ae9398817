"""Tasks for the shop's agent, with gold answers that come from running the tools.

Every task carries the Python that answers it (`metadata["code"]`), so that demonstrations can be
executed and every gold answer can be checked. Three splits:

- `sft_tasks`: one call each, for a warm start;
- `grpo_tasks`: one, two and three calls;
- `held_out_tasks`: 150 tasks whose items, cities and numbers occur in neither of the others; in 60
  of them (`metadata["novel"]`) the chain of calls and the phrasing do not occur either.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toolbrain_core import Task

from .data import HELD_OUT_CITIES, HELD_OUT_ITEMS, TRAINING_CITIES, TRAINING_ITEMS
from .shapes import NOVEL, ONE_CALL, THREE_CALLS, TWO_CALLS, Shape
from .tools import TOOLS

TRAINING_NUMBERS = (2, 3, 5, 6, 8, 9, 10, 12)
HELD_OUT_NUMBERS = (4, 7, 11, 13)

#: Of ten tasks for GRPO two have one call, five have two and three have three.
GRPO_FAMILIES = (
    *(ONE_CALL, TWO_CALLS, THREE_CALLS, TWO_CALLS, TWO_CALLS),
    *(ONE_CALL, TWO_CALLS, THREE_CALLS, TWO_CALLS, THREE_CALLS),
)

#: Draws in a row without a new query before the supply counts as used up.
PATIENCE = 1000


class Vocabulary(NamedTuple):
    """What the blanks of a split are filled with."""

    items: Sequence[str]
    cities: Sequence[str]
    numbers: Sequence[int]

    def fill(self, blanks: Iterable[str], rng: random.Random) -> dict[str, Any]:
        """A value for each blank; those of one kind differ from each other."""
        kinds = {
            "item": rng.sample(self.items, 3),
            "city": rng.sample(self.cities, 2),
            "n": rng.sample(self.numbers, 1),
        }
        kinds["m"] = [rng.choice([x for x in self.numbers if x not in kinds["n"]])]
        return {blank: kinds[blank.rstrip("23")].pop() for blank in blanks}


TRAINING = Vocabulary(list(TRAINING_ITEMS), list(TRAINING_CITIES), TRAINING_NUMBERS)
HELD_OUT = Vocabulary(list(HELD_OUT_ITEMS), list(HELD_OUT_CITIES), HELD_OUT_NUMBERS)


def sft_tasks(n: int, seed: int = 0) -> list[Task]:
    """`n` tasks of one call each, the shapes in turn; about 240 different ones exist.

    Errors: ValueError where there are fewer different queries than asked for.
    """
    return _draw(n, "sft", f"sft-{seed}", TRAINING, lambda k, rng: ONE_CALL[k % len(ONE_CALL)])


def grpo_tasks(n: int, seed: int = 0) -> list[Task]:
    """`n` tasks of one to three calls, in the proportions of `GRPO_FAMILIES`.

    Errors: ValueError where there are fewer different queries than asked for.
    """
    families = GRPO_FAMILIES
    return _draw(
        n, "grpo", f"grpo-{seed}", TRAINING, lambda k, rng: rng.choice(families[k % len(families)])
    )


def held_out_tasks() -> list[Task]:
    """The same 150 tasks each time: 30 each of one, two and three calls, then 60 novel ones."""
    counts = [(ONE_CALL, 30), (TWO_CALLS, 30), (THREE_CALLS, 30), (NOVEL, 60)]
    shapes = [family[k % len(family)] for family, count in counts for k in range(count)]
    return _draw(len(shapes), "held-out", "held-out", HELD_OUT, lambda k, rng: shapes[k])


def run_code(code: str) -> Any:
    """The value of a task's code, with the shop's tools and nothing else at hand."""
    return eval(code, {"__builtins__": {}, **TOOLS})


def tool_calls(code: str) -> list[tuple[str, Any]]:
    """The tool calls in a task's code, as (tool, argument)."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), ast.literal_eval(call.args[0])) for call in calls]


def _draw(
    n: int,
    split: str,
    prefix: str,
    vocabulary: Vocabulary,
    shape_of: Callable[[int, random.Random], Shape],
) -> list[Task]:
    """`n` tasks with different queries. Seeded by `prefix`, which also begins the ids."""
    rng = random.Random(prefix)
    tasks: dict[str, Task] = {}
    misses = 0
    while len(tasks) < n:
        index = len(tasks)
        task = _task(f"{prefix}-{index:03}", split, shape_of(index, rng), vocabulary, rng)
        misses = misses + 1 if task.query in tasks else 0
        if misses > PATIENCE:
            raise ValueError(f"only {index} different {split} tasks were found; {n} are asked for")
        tasks.setdefault(task.query, task)
    return list(tasks.values())


def _task(
    task_id: str, split: str, shape: Shape, vocabulary: Vocabulary, rng: random.Random
) -> Task:
    values = vocabulary.fill(shape.blanks, rng)
    phrasing = rng.randrange(len(shape.phrasings))
    code = shape.code.format(**{blank: _literal(value) for blank, value in values.items()})
    metadata = {
        "code": code,
        "calls": shape.code.count("("),
        "shape": shape.name,
        "phrasing": f"{shape.name}/{phrasing}",
        "split": split,
        "novel": shape in NOVEL,
    }
    query = shape.phrasings[phrasing].format(**_words(values))
    return Task(task_id, query, run_code(code), metadata)


def _literal(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _words(values: Mapping[str, Any]) -> dict[str, Any]:
    """The blanks' values as a phrasing uses them: plain, with an article, in the plural."""
    words = dict(values)
    for blank in [blank for blank in values if blank.startswith("item")]:
        words[f"a_{blank}"] = f"a {values[blank]}"
        words[blank.replace("item", "items")] = f"{values[blank]}s"
    return words
