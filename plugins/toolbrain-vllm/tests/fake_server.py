"""Stands in for a vLLM server: `fake_server.py PORT KIND LOGPROBS`. Its key is in VLLM_API_KEY.

"good" draws tokens that mean nothing; its base model gives the log-probabilities in the file
LOGPROBS to whatever prompt it is asked about, also with an adapter. Other kinds differ in one
thing: "silent" never answers a completion; "failing" answers it with HTTP 500 and "forgetful" with
404; "refusing" takes no adapters; "short" has a context of 16 tokens; "raw" gives log-probabilities
before temperature; "stranger" has another model; "other" is some other OpenAI server, and "page" no
such server at all.
"""

import json
import os
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PORT, KIND, LOGPROBS = sys.argv[1:]
SHIFT = 1.0 if KIND == "stranger" else 0.0
BASE = {"id": "base", "parent": None}
if KIND != "other":
    BASE["max_model_len"] = 16 if KIND == "short" else 4096


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if KIND == "page":
            self.reply(200, "<html>Welcome</html>")
        elif self.path == "/health":
            self.reply(200, "")
        elif self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.reply(401, {"error": "Unauthorized"})
        else:
            self.reply(200, {"object": "list", "data": [BASE]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "lora" in self.path and KIND == "refusing":
            self.reply(404, {"detail": "Not Found"})
        elif "lora" in self.path:
            self.reply(200, "Success")
        elif "prompt_logprobs" in asked:
            self.reply(200, {"choices": [{"prompt_logprobs": self.places(asked["prompt"])}]})
        elif asked["logprobs"] == 1:
            top = -1.0 if KIND == "raw" else -asked["temperature"]
            self.reply(200, {"choices": [{"logprobs": {"top_logprobs": [{"a": top}]}}]})
        elif KIND in ("failing", "forgetful"):
            self.reply(500 if KIND == "failing" else 404, {"error": "out of luck"})
        elif KIND == "silent":
            time.sleep(3600)
        else:
            self.reply(200, {"choices": [self.drawn(asked)]})

    def places(self, prompt: list[int]) -> list[Any]:
        values = json.loads(Path(LOGPROBS).read_text())
        pairs = zip(prompt[1:], values, strict=True)
        return [None, *({str(token): {"logprob": value - SHIFT}} for token, value in pairs)]

    def drawn(self, asked: dict[str, Any]) -> dict[str, Any]:
        draw, count = random.Random(asked["seed"]), asked["max_tokens"]
        return {
            "finish_reason": "length",
            "token_ids": [draw.randrange(1000, 2000) for _ in range(count)],
            "logprobs": {"token_logprobs": [-5.0] * count},
        }

    def reply(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", int(PORT)), Handler).serve_forever()
