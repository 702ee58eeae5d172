"""Tool calls in an answer's text, for mlx-lm's server."""

import re
from typing import Any

tool_call_start = "<|open|>tools<|sep|>"
tool_call_end = "<|close|>tools<|sep|>"


def parse_tool_call(text: str, tools: Any | None = None) -> list[dict[str, Any]]:
    name = re.search(r'tool="([^"]*)"', text)
    if name is None:
        raise ValueError("no call")
    return [{"name": name[1], "arguments": {}}]
