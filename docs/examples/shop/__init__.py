"""A small shop: its catalogue, the tools an agent gets, and tasks with answers that are computed.

from shop.agent import demonstrate, make_agent
from shop.tasks import grpo_tasks, held_out_tasks, sft_tasks
"""
