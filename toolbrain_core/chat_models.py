"""Language models that answer by the side: as writers of tasks, teachers, judges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import define, field

from .roles import AttemptKey, ChatReply, ChatRequest, Policy


@define(eq=False)
class PolicyChat:
    """The policy itself as a `ChatModel`, inside its `serving()`: each request by itself."""

    policy: Policy
    seed: int = 0
    _numbers: Iterator[int] = field(factory=itertools.count)

    def chat(self, request: ChatRequest) -> ChatReply:
        key = AttemptKey("chat", 0, "chat", next(self._numbers), self.seed)
        return self.policy.session(key, purpose="use").chat(request)
