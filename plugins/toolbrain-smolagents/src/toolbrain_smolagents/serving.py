"""A session for an agent that answers by itself: it keeps turns and is never asked."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from toolbrain_core.errors import NotServed
from toolbrain_core.roles import AttemptKey, ChatReply, ChatRequest
from toolbrain_core.sessions import Transcript

_KEY = AttemptKey(run="serving", iteration=0, task_id="", attempt=0)


@define(eq=False)
class OwnSession:
    """What `observe` reads while a bound agent runs."""

    key: AttemptKey = _KEY
    transcript: Transcript = field(factory=Transcript)

    @property
    def state(self) -> dict[str, Any]:
        return self.transcript.state

    def chat(self, request: ChatRequest) -> ChatReply:
        raise NotServed("a bound agent answers with its own model")

    async def achat(self, request: ChatRequest) -> ChatReply:
        return self.chat(request)
