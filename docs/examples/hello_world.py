"""Train a small agent to add with its tool, and say honestly what it learned.

    python docs/examples/hello_world.py

Runs in a few minutes on two CPU cores, with the embedded model: no hub and no GPU are needed.
"""

from smolagents import CodeAgent, TransformersModel, tool
from toolbrain_smolagents import compact_prompts
from toolbrain_transformers.embedded import embedded_model_path

from toolbrain_core import Brain, Task, ToolCall, compare
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
HELD_OUT = additions((a, b) for a in (4, 19, 37, 86) for b in (8, 23, 45, 71))


def demonstrations(brain, pairs):
    """The agent adding with its tool, executed for real."""
    return [
        brain.demonstrate(
            Task(f"{a}+{b}", **addition), [ToolCall("sum", "add", {"a": a, "b": b}, via="code")]
        )
        for (a, b), addition in zip(pairs, additions(pairs), strict=True)
    ]


def main():
    model = TransformersModel(
        model_id=str(embedded_model_path()), max_new_tokens=48, do_sample=False
    )
    agent = CodeAgent(
        tools=[add], model=model, prompt_templates=compact_prompts(), max_steps=1, verbosity_level=0
    )
    brain = Brain(agent, algorithm="GRPO", reward_func=reward_exact_match)

    before = brain.evaluate(HELD_OUT)
    # Untrained, these 135M weights never write a code block: rewards would all be 0, and GRPO
    # learns from differences only. A larger model can do without this warm start.
    shown = demonstrations(brain, [(2, 9), (14, 3), (21, 30), (65, 17)])
    brain.train(shown, algorithm="sft", learning_rate=5e-4, num_iterations=4, rows_per_step=4)
    warm = brain.evaluate(HELD_OUT)
    result = brain.train(TRAINING, num_iterations=2)
    after = brain.evaluate(HELD_OUT)

    evaluations = {"before": before, "after 4 demonstrations": warm, "after GRPO": after}
    for name, evaluation in evaluations.items():
        print(f"\nHeld-out additions, {name}:")
        print("\n".join(evaluation.lines()))
    print(f"\nGRPO made {result.updates} updates.")
    print(f"All training: {compare(before, after).sentence()}")
    print(f"GRPO alone:   {compare(warm, after).sentence()}")


if __name__ == "__main__":
    main()
