"""Train a small agent to add with its tool, and say honestly what it learned.

    python docs/examples/hello_world.py

Runs in a few minutes on two CPU cores, with the embedded model: no hub and no GPU are needed.
"""

from smolagents import CodeAgent, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from toolbrain_transformers.embedded import embedded_model_path

from toolbrain_core import Brain, compare
from toolbrain_core.rewards import reward_exact_match


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def additions(pairs):
    return [
        {"query": f"Use the add tool to calculate {a} + {b}", "gold_answer": str(a + b)}
        for a, b in pairs
    ]


# No number of the held-out tasks occurs in training.
TRAINING = additions((a, b) for a in (5, 12, 31, 48) for b in (7, 26, 63))
HELD_OUT = additions((a, b) for a in (4, 19, 37, 52, 86) for b in (8, 23, 45, 71))


def main():
    model = TransformersModel(
        model_id=str(embedded_model_path()), max_new_tokens=48, do_sample=False
    )
    agent = CodeAgent(
        tools=[add], model=model, prompt_templates=compact_prompts(), max_steps=1, verbosity_level=0
    )
    brain = Brain(agent, algorithm="GRPO", reward_func=reward_exact_match)

    before = brain.evaluate(HELD_OUT)
    result = brain.train(TRAINING, num_iterations=4)
    after = brain.evaluate(HELD_OUT)

    print(f"{result.updates} updates of the weights")
    for name, evaluation in (("before", before), ("after", after)):
        print(f"\nHeld-out additions, {name} training:")
        print("\n".join(evaluation.lines()))
    print(f"\n{compare(before, after).sentence()}")


if __name__ == "__main__":
    main()
