"""Short conversations, written for this project: the nanos' fifth domain.

:func:`conversations` yields endless (messages, tools) pairs in the form that a chat
template takes. A small grammar fills them: sums, facts, words, code, Chinese, and
tools that look up weather, files, prices or sums, one call or two at a time.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]

CITIES = "Rome Paris Berlin Madrid Vienna Lima Oslo Cairo Delhi Tokyo Seoul Quito"
CAPITALS = {
    "Italy": "Rome",
    "France": "Paris",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Peru": "Lima",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "India": "Delhi",
    "Japan": "Tokyo",
}
COLOURS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "the sky": "blue",
    "a lemon": "yellow",
    "blood": "red",
    "an orange": "orange",
    "a ripe plum": "purple",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "old": "new",
    "open": "closed",
    "light": "dark",
    "first": "last",
    "full": "empty",
    "early": "late",
    "hard": "soft",
}
WORDS = (
    "river stone table garden window letter summer winter bridge copper silver "
    "paper number market island forest engine signal memory buffer kernel thread"
)
HAN_DIGITS = "零一二三四五六七八九十"
HAN_OPPOSITES = {
    "大": "小",
    "高": "低",
    "长": "短",
    "多": "少",
    "冷": "热",
    "新": "旧",
    "黑": "白",
    "左": "右",
    "上": "下",
    "前": "后",
}
FILES = "notes.txt main.c setup.py readme.md config.json test.log"
LINES = (
    "all tests passed",
    "error: file not found",
    "version 2",
    "hello world",
    "to do: write the tests",
    "the build is green",
    "warning: unused variable",
)
FUNCTIONS = {
    "adds two numbers": ("add", "a, b", "a + b"),
    "doubles a number": ("double", "x", "2 * x"),
    "squares a number": ("square", "x", "x * x"),
    "finds the larger of two numbers": ("larger", "a, b", "max(a, b)"),
    "counts the items of a list": ("count", "items", "len(items)"),
    "reverses a string": ("reverse", "text", "text[::-1]"),
    "tests if a number is even": ("is_even", "n", "n % 2 == 0"),
    "sums a list": ("total", "items", "sum(items)"),
}


def conversations(seed: int) -> Iterator[Conversation]:
    """Conversations without end; the same for the same seed."""
    rng = random.Random(seed)
    plain = (_sum, _fact, _word, _code, _han, _compare, _greeting)
    while True:
        if rng.random() < 0.4:
            yield _with_tools(rng)
            continue
        messages = list(rng.choice(plain)(rng))
        if rng.random() < 0.35:
            messages += rng.choice(plain)(rng)
        yield messages, None


def _turn(question: str, thought: str, answer: str) -> list[Message]:
    return [_user(question), _assistant(thought, answer)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(
    thought: str, answer: str, calls: list[Message] | None = None
) -> Message:
    message: Message = {"role": "assistant", "content": answer}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _pick(rng: random.Random, words: str) -> str:
    return rng.choice(words.split())


def _sum(rng: random.Random) -> list[Message]:
    a, b = rng.randint(2, 60), rng.randint(2, 39)
    if rng.random() < 0.5:
        return _turn(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", f"{a + b}")
    a = max(a, b)
    asked = rng.choice((f"What is {a} - {b}?", f"Take {b} from {a}."))
    return _turn(asked, f"{a} - {b} = {a - b}.", f"{a - b}")


def _fact(rng: random.Random) -> list[Message]:
    kind = rng.randrange(3)
    if kind == 0:
        land, city = rng.choice(list(CAPITALS.items()))
        answer = f"The capital of {land} is {city}."
        return _turn(f"What is the capital of {land}?", f"{land}: {city}.", answer)
    if kind == 1:
        thing, colour = rng.choice(list(COLOURS.items()))
        asked = f"Which colour is {thing}?"
        return _turn(asked, f"They ask for a colour: {colour}.", f"It is {colour}.")
    word, other = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    asked = f"What is the opposite of {word}?"
    return _turn(asked, f"Not {word} means {other}.", f"The opposite is {other}.")


def _word(rng: random.Random) -> list[Message]:
    word = _pick(rng, WORDS)
    kind = rng.randrange(3)
    if kind == 0:
        spelled = " ".join(word)
        asked, thought = f"How many letters has {word}?", f"{spelled}: {len(word)}."
        return _turn(asked, thought, f"It has {len(word)} letters.")
    if kind == 1:
        return _turn(f"Spell {word}.", "Letter by letter.", "-".join(word))
    asked = f"Write {word} in capitals."
    return _turn(asked, f"Capitals of {word}.", word.upper())


def _code(rng: random.Random) -> list[Message]:
    what, (name, arguments, result) = rng.choice(list(FUNCTIONS.items()))
    code = f"```python\ndef {name}({arguments}):\n    return {result}\n```"
    asked = rng.choice(("Write a Python function that", "I need a function that"))
    return _turn(f"{asked} {what}.", f"A function {name} with {arguments}.", code)


def _han(rng: random.Random) -> list[Message]:
    kind = rng.randrange(2)
    if kind == 0:
        a, b = rng.randint(1, 5), rng.randint(1, 5)
        left, right, total = HAN_DIGITS[a], HAN_DIGITS[b], HAN_DIGITS[a + b]
        asked, thought = f"{left}加{right}等于几？", f"{left}加{right}是{total}。"
        return _turn(asked, thought, f"等于{total}。")
    word, other = rng.choice(list(HAN_OPPOSITES.items()))
    return _turn(f"“{word}”的反义词是什么？", f"{word}，{other}。", f"是“{other}”。")


def _compare(rng: random.Random) -> list[Message]:
    a, b = rng.sample(range(2, 99), 2)
    asked = f"Which is larger, {a} or {b}?"
    sign = ">" if a > b else "<"
    return _turn(asked, f"{a} {sign} {b}.", f"{max(a, b)} is larger.")


def _greeting(rng: random.Random) -> list[Message]:
    word = rng.choice(("Hello", "Hi", "Good morning", "Hi there"))
    asked = rng.choice((f"{word}!", f"{word}, who are you?"))
    answer = "Hello! I am a very small Kimi K3. How can I help?"
    return _turn(asked, "A greeting. I say hello.", answer)


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = {
    "weather": _tool("weather", "Weather of a city", city="string"),
    "read_file": _tool("read_file", "Read a file", path="string"),
    "add": _tool("add", "Add two numbers", a="number", b="number"),
    "price": _tool("price", "Price of an item", item="string", count="number"),
}


def _call(index: int, name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{index}", "type": "function", "function": function}


def _result(index: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": text}


def _with_tools(rng: random.Random) -> Conversation:
    name = rng.choice(list(TOOLS))
    offered = {name, rng.choice(list(TOOLS))}
    tools = [TOOLS[key] for key in TOOLS if key in offered]
    make = {
        "weather": _weather,
        "read_file": _read_file,
        "add": _add,
        "price": _price,
    }[name]
    return make(rng), tools


def _weather(rng: random.Random) -> list[Message]:
    cities = rng.sample(CITIES.split(), 2 if rng.random() < 0.3 else 1)
    skies = [rng.choice(("sunny", "cloudy", "rainy", "windy")) for _ in cities]
    degrees = [rng.randint(-5, 35) for _ in cities]
    calls = [_call(i, "weather", {"city": city}) for i, city in enumerate(cities)]
    results = [
        _result(i, f"{sky}, {degree} degrees")
        for i, (sky, degree) in enumerate(zip(skies, degrees, strict=True))
    ]
    found = zip(cities, skies, degrees, strict=True)
    answer = " ".join(f"{c}: {sky}, {degree} degrees." for c, sky, degree in found)
    return [
        _user(f"How is the weather in {' and '.join(cities)}?"),
        _assistant(f"I look up {' and '.join(cities)}.", "", calls),
        *results,
        _assistant("Now I know it.", answer),
    ]


def _read_file(rng: random.Random) -> list[Message]:
    path, line = _pick(rng, FILES), rng.choice(LINES)
    return [
        _user(f"What is in {path}?"),
        _assistant(f"I read {path}.", "", [_call(0, "read_file", {"path": path})]),
        _result(0, line),
        _assistant("I tell what it says.", f"{path} says: {line}"),
    ]


def _add(rng: random.Random) -> list[Message]:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    return [
        _user(f"Add {a} and {b}."),
        _assistant("I use the tool.", "", [_call(0, "add", {"a": a, "b": b})]),
        _result(0, f"{a + b}"),
        _assistant("The tool has added them.", f"The sum is {a + b}."),
    ]


def _price(rng: random.Random) -> list[Message]:
    item, count = _pick(rng, WORDS), rng.randint(2, 9)
    cost = count * rng.randint(2, 20)
    arguments = {"item": item, "count": count}
    return [
        _user(f"What do {count} of {item} cost?"),
        _assistant(f"I ask for {item}.", "", [_call(0, "price", arguments)]),
        _result(0, f"{cost} coins"),
        _assistant("That is the price.", f"They cost {cost} coins."),
    ]
