"""``kimi-k3 demo``: stock mlx-lm runs a small Kimi K3, and a build it cannot load.

Every step is a child process with a stock command, started as a user's shell would: the
only thing that connects it with this package is the installation.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..registration import SWITCH, is_ours
from .cache import demo_folders

PROMPT = "Write a Python function that adds two numbers."
MAX_TOKENS = 96
LEAST_TOKENS = 20

_CHILD_SECONDS = 180

#: Loads each folder named on the command line as mlx-lm does; one JSON line for each.
_LOAD = """
import json, sys
from pathlib import Path
from mlx_lm.utils import load_model
for folder in sys.argv[1:]:
    found = {"file": None, "error": None}
    try:
        model, _ = load_model(Path(folder))
        found["file"] = sys.modules[type(model).__module__].__file__
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
"""


@dataclass(frozen=True)
class Loaded:
    """What a process that loads a folder found: the class's file, or the error."""

    file: str | None
    error: str | None

    @property
    def ours(self) -> bool:
        return is_ours(self.file)


@dataclass(frozen=True)
class Generation:
    """One run of the stock command: its text and how many tokens it counted."""

    command: tuple[str, ...]
    text: str
    tokens: int
    complaint: str | None


@dataclass(frozen=True)
class DemoReport:
    """Everything that the demo saw. ``problems`` is empty if it succeeded.

    ``loaded`` and ``control`` belong to the plain and the two-bank folder, in this
    order; ``control`` was loaded with the package switched off.
    """

    generations: tuple[Generation, ...]
    loaded: tuple[Loaded, ...]
    control: tuple[Loaded, ...]
    problems: tuple[str, ...]
    seconds: float


def run_demo(
    cache_dir: str | Path,
    *,
    environment: Mapping[str, str],
    progress: Callable[[str], None],
) -> DemoReport:
    """Write the copy, generate with nano and copy, load both with the package off.

    ``environment`` is handed to the children, without the off switch; ``progress`` gets
    each line as soon as it is known.
    """
    start = time.perf_counter()
    say = progress
    say("A trained Kimi K3 of 3.8 million parameters, with every part of the real one.")
    folders = demo_folders(cache_dir)
    size = sum(path.stat().st_size for path in folders.plain.iterdir()) / 1e6
    say(f"Shipped with the package: {folders.plain} ({size:.1f} MB)")
    say(
        f"Its pruned copy, {'written' if folders.made else 'found'}: {folders.two_bank}\n"
    )
    pair = (folders.plain, folders.two_bank)
    on = {key: value for key, value in environment.items() if key != SWITCH}
    # The folders are local; nothing should be asked of a network.
    on["HF_HUB_OFFLINE"] = "1"

    say("1. The stock command, on the format of Moonshot's own release:")
    generations = [_generate(folders.plain, on, say)]
    say(
        "2. The same, on a copy of 61 % of the size: a quarter of the experts dropped, as"
    )
    say("   many of a layer as it can spare, and a quarter of the others in 2 bits:")
    generations.append(_generate(folders.two_bank, on, say))

    say("3. Which class mlx-lm loads for these folders:")
    loaded = _load(pair, on)
    for folder, found in zip(pair, loaded, strict=True):
        say(f"   {folder.name}: {found.file or found.error}")
    say(f"\n4. For comparison, the same with {SWITCH}=off, which is mlx-lm alone:")
    control = _load(pair, on | {SWITCH: "off"})
    for folder, found in zip(pair, control, strict=True):
        say(f"   {folder.name}: {found.file or _first_lines(found.error)}")

    problems = find_problems(generations, loaded, control)
    seconds = time.perf_counter() - start
    say("")
    for problem in problems:
        say(f"problem: {problem}")
    if not problems:
        say("mlx-lm's own command ran both, and the second only with this package.")
    say(f"{'Failed' if problems else 'Done'} after {seconds:.0f} s.")
    return DemoReport(
        tuple(generations), tuple(loaded), tuple(control), tuple(problems), seconds
    )


def find_problems(
    generations: Sequence[Generation],
    loaded: Sequence[Loaded],
    control: Sequence[Loaded],
) -> list[str]:
    """What is not as it should be, in words with a next step; [] if all is well."""
    problems = []
    for run, found in zip(generations, loaded, strict=True):
        name = shlex.join(run.command)
        if run.complaint:
            problems.append(f"`{name}` failed: {run.complaint}")
        elif run.tokens < LEAST_TOKENS:
            problems.append(
                f"`{name}` gave {run.tokens} tokens, expected {LEAST_TOKENS} or more."
            )
        if not found.ours:
            problems.append(
                f"mlx-lm loaded {found.file or found.error} instead of this package's "
                "class; `kimi-k3 doctor` says why."
            )
    plain, two_bank = control
    if plain.file is None or plain.ours:
        problems.append(
            f"With {SWITCH}=off mlx-lm should load the plain folder with its own "
            f"class, but: {plain.file or plain.error}"
        )
    if two_bank.error is None or "bank_hi" not in two_bank.error:
        problems.append(
            f"With {SWITCH}=off mlx-lm should refuse the two-bank folder and name a "
            f"bank_hi tensor, but: {two_bank.file or two_bank.error}"
        )
    return problems


def parse_generation(output: str) -> tuple[str, int]:
    """The text between mlx-lm's rulers and the token count of its last lines."""
    parts = output.split("=" * 10 + "\n")
    text = parts[1].removesuffix("\n") if len(parts) >= 3 else ""
    counted = re.findall(r"^Generation: (\d+) tokens", output, flags=re.MULTILINE)
    return text, int(counted[-1]) if counted else 0


def _generate(
    folder: Path, environment: Mapping[str, str], say: Callable[[str], None]
) -> Generation:
    options = ["--model", str(folder), "--prompt", PROMPT]
    options += ["--max-tokens", str(MAX_TOKENS)]
    command = ("mlx_lm.generate", *options)
    say(f"   $ {shlex.join(command)}")
    child = [sys.executable, "-m", "mlx_lm", "generate", *options]
    output, complaint = _run(child, folder.parent, environment)
    text, tokens = parse_generation(output)
    if complaint:
        say(f"   {complaint}\n")
    else:
        say(f"   {printable(text)}")
        say(f"   {tokens} tokens\n")
    return Generation(command, text, tokens, complaint)


def _load(folders: Sequence[Path], environment: Mapping[str, str]) -> list[Loaded]:
    child = [sys.executable, "-c", _LOAD, *map(str, folders)]
    output, complaint = _run(child, folders[0].parent, environment)
    found = [line for line in output.splitlines() if line.startswith('{"file"')]
    if complaint or len(found) != len(folders):
        return [Loaded(None, complaint or "no answer")] * len(folders)
    return [Loaded(**json.loads(line)) for line in found]


def _run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[str, str | None]:
    """Standard output of ``command``, and the end of its complaint if it failed."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=dict(environment) | {"PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_CHILD_SECONDS} s"
    if done.returncode == 0:
        return done.stdout, None
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    return done.stdout, f"exit code {done.returncode}: {last[0]}"


def printable(text: str) -> str:
    """``text`` in one line that a terminal shows as it is."""
    return "".join(char if char.isprintable() else "·" for char in text)


def _first_lines(text: str | None, lines: int = 2) -> str:
    found = (text or "nothing").splitlines()
    return "\n     ".join(found[:lines]) + (" …" if len(found) > lines else "")
