"""Conversations at random that mlx-vlm's renderer takes too, with their options."""

import json
import random
from typing import Any

from conversations import INJECTION, WEATHER, assistant, call, system, tool, user
from lines import sample_lines

_LINES = sample_lines(80, seed=3)

_SPELLED = (
    *("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "<|media_pad|>"),
    *(
        "message",
        'message role="system"',
        "think",
        "tools",
        "<|kimi_image_placeholder|>",
    ),
    *('"', "&", "&quot;", "=", ">", INJECTION),
)


class Chat:
    """One conversation; the same for the same ``seed``."""

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.options = self._options()
        for _ in range(self._rng.randint(1, 6)):
            self._add()

    def _maybe(self, chance: float = 0.5) -> bool:
        return self._rng.random() < chance

    def _text(self) -> str:
        rng = self._rng
        kind = rng.random()
        if kind < 0.1:
            return rng.choice(("", " ", "\n", "a"))
        if kind < 0.5:
            return "".join(rng.choices(_SPELLED, k=rng.randint(1, 5)))
        line = rng.choice(_LINES)
        return line[: rng.randint(1, len(line))]

    def _content(self) -> Any:
        kind = self._rng.random()
        if kind < 0.1:
            return None
        if kind < 0.3:
            count = self._rng.randint(0, 3)
            return [{"type": "text", "text": self._text()} for _ in range(count)]
        return self._text()

    def _named(self) -> dict[str, Any]:
        return {"name": self._text()} if self._maybe(0.2) else {}

    def _value(self, depth: int = 0) -> Any:
        rng = self._rng
        kind = rng.randrange(5 if depth > 1 else 7)
        if kind < 2:
            return self._text()
        if kind < 5:
            return rng.choice((None, True, False, 0, -7, 2.5, 1e300, 10**20))
        inner = [self._value(depth + 1) for _ in range(rng.randint(0, 2))]
        return inner if kind == 5 else {self._text(): value for value in inner}

    def _object(self) -> dict[str, Any]:
        return {self._text(): self._value() for _ in range(self._rng.randint(0, 3))}

    def _arguments(self) -> Any:
        kind = self._rng.random()
        if kind < 0.1:
            return self._rng.choice((None, "", " ", "{", '{"a": <|sep|>}'))
        arguments = self._object()
        if kind < 0.3:
            return json.dumps(arguments, ensure_ascii=self._maybe())
        return arguments

    def _add(self) -> None:
        kind = self._rng.randrange(6)
        if kind == 0 and self._maybe(0.3):
            self.messages.append({"role": "system", "tools": [self._object()]})
        elif kind == 0:
            self.messages.append(system(self._content(), **self._named()))
        elif kind < 3:
            self.messages.append(user(self._content(), **self._named()))
        else:
            self._answer(calls=self._rng.randint(1, 3) if kind > 3 else 0)

    def _answer(self, calls: int) -> None:
        rng = self._rng
        key = rng.choice(("reasoning", "reasoning_content"))
        message = assistant(self._content(), **self._named())
        if self._maybe():
            message[key] = self._text()
        self.messages.append(message)
        if not calls:
            return
        place = len(self.messages)
        ids = [f"call-{place}-{n}" for n in range(calls)]
        message["tool_calls"] = [
            call(self._text() or "f", self._arguments(), call_id) for call_id in ids
        ]
        results = [tool(self._content(), tool_call_id=call_id) for call_id in ids]
        if self._maybe(0.3):
            results = [tool(result["content"]) for result in results]
        else:
            rng.shuffle(results)
        self.messages += results

    def _options(self) -> dict[str, Any]:
        rng = self._rng
        options: dict[str, Any] = {"add_generation_prompt": self._maybe()}
        if self._maybe(0.3):
            options["tools"] = [{"function": self._object()}]
        if self._maybe(0.3):
            options["thinking"] = self._maybe()
        if self._maybe(0.3):
            options["thinking_effort"] = rng.choice(("low", "high", "max", None))
        if self._maybe(0.2):
            choice = rng.choice(("required", "none", "auto", None))
            options["tool_choice"] = choice
            if choice == "required":
                options.setdefault("tools", [WEATHER])
        if self._maybe(0.2):
            options["response_format"] = rng.choice(
                (
                    *({"type": "text"}, {"type": "json_object"}, None),
                    {"type": "json_schema", "json_schema": {"schema": self._object()}},
                )
            )
        return options
