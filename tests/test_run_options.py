"""``kimi-k3 run`` refuses what mlx-lm's commands cannot do with a K3, and only that.

Each refusal is held against mlx-lm itself: that the option is there, and what becomes of
it without us (B52 and its kind).
"""

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.server
import pytest
from closeness import relative_error
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_tokenizer
from serving import SCRIPTED, serve_script
from tiny_k3 import t0_config, t0_model, write_t1

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.errors import KimiK3Error
from kimi_k3.run import run_host
from kimi_k3.run_options import CHAT_NAMES, OPTIONS, check_options
from kimi_k3.tokenizer.options import chat_options

#: Sizes whose cached latents, 64 and 32 numbers, have a group size of MLX: 32.
GROUPED = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}

PROMPT = mx.array([(37 * i) % 97 for i in range(40)])


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model(**GROUPED)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Any:
    folder = write_t1(tmp_path_factory.mktemp("t1") / "model", tokenizer=True)
    return load_tokenizer(folder)


def text_args(config: dict[str, Any]) -> Callable[[], TextArgs]:
    return lambda: ModelArgs.from_dict(config).text_config


FULL_SIZE = text_args(full_size_config())
ODD = text_args(t0_config())  # caches 16 and 8 numbers: no group size divides them

REFUSED = [
    ("server", "--draft-model /models/small", "cannot speed up Kimi K3"),
    ("generate", "--draft-model=/models/small", "Leave --draft-model out"),
    ("server", "--draft /models/small", "taken back"),
    ("server", "--chat-template {{messages}}", "no Jinja template"),
    ("generate", "--max-kv-size 4096", "does nothing"),
    ("chat", "--max-kv 4096", "keep the conversation short"),
    ("cache_prompt", "--max-kv-size 4096", "does nothing"),
    ("server", "--kv-bits 8 --kv-group-size 128", "Choose --kv-group-size 32 or 64"),
    ("generate", "--kv-b=4 --kv-group-size=128", "512 and 64 numbers an MLA layer"),
    ("generate", "--kv-bits 7", "choose one of 2, 3, 4, 5, 6 or 8"),
    ("server", "--kv-bits 8 --kv-group-size 48", "Choose --kv-group-size"),
    (
        "server",
        '--chat-template-args={"reasoning_effort":"hi"}',
        "^--chat-template-args: reason",
    ),
    ("generate", '--chat-template-config {"thinking_effort":"hi"}', "low, high, max"),
    (
        "server",
        '--chat-template-args {"reasoning_efort":"high"}',
        ", reasoning_effort.$",
    ),
    ("generate", '--chat-template-c {"efort":1}', "it knows tools, thinking,"),
    ("evaluate", '--chat-template-args {"tokenize":true}', "has 'tokenize'"),
    (
        "server",
        '--chat-template-args {"tools":[]}',
        "tools, which mlx_lm.server passes",
    ),
    ("generate", '--chat-template-config {"add_generation_prompt":true}', "leave it"),
    ("server", '--chat-template-args {"thinking":"on"}', "thinking is 'on'"),
    ("server", '--chat-template-args {"response_format":"yaml"}', "knows 'text'"),
    ("generate", '--chat-template-config {"tool_choice":"required"}', "no tools"),
    ("server", "--chat-template-args []", "no JSON object"),
    ("server", "--chat-template-args high", "no JSON .*in single quotes"),
    ("generate", "--chat-template-config=", "no JSON .*in single quotes"),
]


@pytest.mark.parametrize(("command", "arguments", "said"), REFUSED)
def test_refused_with_reason_and_way_out(command: str, arguments: str, said: str):
    with pytest.raises(KimiK3Error, match=said):
        check_options(f"mlx_lm.{command}", arguments.split(), FULL_SIZE)
    with pytest.raises(KimiK3Error, match=said):
        check_options("mlx_lm", [command, *arguments.split()], FULL_SIZE)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("server", "--kv-bits 8"),  # groups of 64, mlx-lm's default
        ("server", "--kv-bits 4 --kv-group-size 32 --quantized-kv-start 0"),
        ("generate", "--kv-group-size 128"),  # nothing is quantised
        ("server", "--chat-template-args {} --pipeline --num-draft-tokens 2"),
        ("server", "--use-default-chat-template --prompt-cache-size 4"),
        ("generate", "--chat-template-config {} -m 20 --prompt-cache-file a.b"),
        ("server", '--chat-template-args {"reasoning_effort":"high"}'),
        ("server", '--chat-template-args {"tool_choice":"required"}'),
        ("generate", '--chat-template-config {"enable_thinking":false}'),
        ("generate", '--chat-template-config {"thinking_effort":null,"tools":[]}'),
        ("evaluate", '--chat-template-args {"thinking":false}'),
        ("generate", "--kv 8"),  # ambiguous: mlx-lm says so
        ("generate", "--kv-bits"),
        ("generate", "--kv-bits eight"),
        ("lora", "--draft-model x"),  # has no such option
        ("chat", "--draft-model x"),
    ],
)
def test_everything_else_is_mlx_lms(command: str, arguments: str):
    check_options(f"mlx_lm.{command}", arguments.split(), FULL_SIZE)


def test_other_hosts_have_options_of_their_own():
    check_options("mlx_vlm.generate", ["--draft-model", "x"], FULL_SIZE)
    check_options("mlx_lm", [], FULL_SIZE)


def test_a_model_without_any_group_size():
    with pytest.raises(KimiK3Error, match="leave --kv-bits out"):
        check_options("mlx_lm.server", ["--kv-bits", "8"], ODD)


def host_options(command: str) -> set[str]:
    """Long options that mlx-lm's own command has."""
    seen: list[argparse.ArgumentParser] = []

    def parse(parser: argparse.ArgumentParser, *_: Any) -> None:
        seen.append(parser)
        raise SystemExit

    module = import_module(f"mlx_lm.{command}")
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        pytest.raises(SystemExit),
    ):
        module.main()
    return set(seen[0]._option_string_actions)


def test_the_chat_format_knows_just_the_names_that_are_let_through(
    caplog: pytest.LogCaptureFixture,
):
    values: dict[str, Any] = dict.fromkeys(CHAT_NAMES)
    chat_options(**values)
    assert not caplog.records
    for name in ("reasoning_efort", "tokenize", "return_dict"):
        assert name not in CHAT_NAMES
        chat_options(**{name: True})
        assert f"no option {name!r}" in caplog.messages.pop()


@pytest.mark.parametrize(
    "command", ["generate", "server", "chat", "cache_prompt", "evaluate"]
)
def test_commands_have_the_options_that_are_looked_at(command: str):
    ours = {option for option, commands in OPTIONS.items() if command in commands}
    has = host_options(command)
    assert ours <= has
    assert not (set(OPTIONS) - ours) & has


def test_run_stops_before_the_command_starts(tmp_path: Path):
    build = write_t1(tmp_path / "build", tokenizer=True, **GROUPED)
    for options in (
        "--draft-model x",
        "--kv-bits 7",
        "--chat-template x",
        "--chat-template-args []",
    ):
        arguments = ["--model", str(build), *options.split()]
        for command in (["mlx_lm.server"], ["mlx_lm", "server"]):
            with (
                mock.patch.object(mlx_lm.server, "run") as started,
                pytest.raises(KimiK3Error, match=options.split()[0]),
            ):
                run_host(command[0], [*command[1:], *arguments])
            assert not started.called
    with mock.patch.object(mlx_lm.server, "run") as started:
        run_host(
            "mlx_lm.server",
            ["--model", str(build), "--kv-bits", "8", "--kv-group-size", "32"],
        )
    assert started.called


@pytest.mark.parametrize("command", ["server", "generate", "chat"])
def test_run_wants_a_model(command: str, tmp_path: Path):
    module = import_module(f"mlx_lm.{command}")
    for start in ((f"mlx_lm.{command}", []), ("mlx_lm", [command])):
        for arguments, said in (
            ([], f"no --model is given: mlx_lm.{command} .* Add --model FOLDER"),
            (["--model"], "no --model is given"),
            (["--model", ""], "--model is empty"),
            (["--model="], "--model is empty"),
            (["--mod", " "], "--mod is empty"),
            (["--model", str(tmp_path / "none")], "none is not there"),
        ):
            with (
                mock.patch.object(module, "main") as started,
                pytest.raises(KimiK3Error, match=said),
            ):
                run_host(start[0], [*start[1], *arguments])
            assert not started.called
        with mock.patch.object(module, "main") as started:
            run_host(start[0], [*start[1], "--help"])
        assert started.called


def test_a_server_without_a_model_fails_with_requests():
    """Why ``run`` wants one."""
    argv = ["server"]
    made: list[Any] = []
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(mlx_lm.server, "run", lambda host, port, it: made.append(it)),
    ):
        mlx_lm.server.main()
    made[0].load_default()
    assert made[0].model is None
    with pytest.raises(TypeError):
        made[0].load("default_model", None, "default_model")


@pytest.mark.parametrize(
    ("given", "said"),
    [('{"reasoning_effort": "hi"}', "choose none"), ('{"tokenize": true}', "multiple")],
)
def test_without_us_every_request_fails(
    given: str, said: str, model: Any, tokenizer: Any
):
    from openai import NotFoundError

    with (
        serve_script(model, tokenizer, "--chat-template-args", given) as server,
        pytest.raises(NotFoundError) as failed,
    ):
        server.client().chat.completions.create(
            model="default_model", messages=[{"role": "user", "content": "hello"}]
        )
    assert said in failed.value.response.text


class TestB52:
    """Tokens cannot be taken back, so guessing ahead is refused, never done wrong."""

    def test_generating_with_a_draft_gives_no_token(self, model: Any, tokenizer: Any):
        with pytest.raises(ValueError, match="requires a trimmable prompt cache"):
            next(stream_generate(model, tokenizer, PROMPT, draft_model=model))

    def test_a_server_with_a_draft_answers_nothing_and_lives(
        self, model: Any, tokenizer: Any
    ):
        """No wrong token; but the client is not told why, so ``run`` says it before."""
        from openai import APIConnectionError

        with serve_script(model, tokenizer, "--draft-model", SCRIPTED) as server:
            for _ in range(2):
                with pytest.raises(APIConnectionError):
                    server.client().chat.completions.create(
                        model="default_model",
                        messages=[{"role": "user", "content": "hello"}],
                        max_tokens=4,
                    )
            assert server.healthy()

    def test_as_a_draft_it_slows_down_and_changes_nothing(
        self, model: Any, tokenizer: Any
    ):
        """Its rejected guesses stay in its own cache; the main model checks each."""
        main = trimmable_model(len(tokenizer))

        def greedy(**options: Any) -> list[int]:
            said = stream_generate(main, tokenizer, PROMPT, max_tokens=12, **options)
            return [part.token for part in said]

        assert greedy(draft_model=model, num_draft_tokens=2) == greedy()


def trimmable_model(vocabulary: int) -> Any:
    from mlx_lm.models import qwen2

    config = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
    }
    mx.random.seed(0)
    return qwen2.Model(qwen2.ModelArgs.from_dict(config))


class TestQuantisedCache:
    """``--kv-bits``: what the MLA layers keep in groups of 8 or 4 bits."""

    def steps(
        self, model: Any, prompt: mx.array = PROMPT, **options: Any
    ) -> tuple[mx.array, list[Any]]:
        """Log-probabilities of 8 greedy steps, and the cache after them."""
        cache = make_prompt_cache(model)
        options = {"quantized_kv_start": 0, "kv_group_size": 32} | options
        said = [
            logprobs
            for _, logprobs in generate_step(
                prompt, model, prompt_cache=cache, max_tokens=8, **options
            )
        ]
        return mx.stack(said), cache

    def test_eight_bits_are_near_the_plain_cache_and_two_are_not(self, model: Any):
        errors: dict[int, list[float]] = {8: [], 2: []}
        for start in range(5):
            prompt = (PROMPT + 11 * start) % 97
            plain, _ = self.steps(model, prompt)
            for bits, found in errors.items():
                got, cache = self.steps(model, prompt, kv_bits=bits)
                assert [type(c) for c in cache].count(QuantizedKVCache) == 1
                found.append(relative_error(got[0], plain[0]))
        # Random experts amplify: a little error in the router picks other ones.
        assert max(errors[8]) < 0.02
        assert max(errors[2]) > 5 * max(errors[8])

    def test_later_than_its_start_it_is_plain(self, model: Any):
        plain, _ = self.steps(model)
        got, cache = self.steps(model, kv_bits=4, quantized_kv_start=5000)
        assert relative_error(got, plain) == 0
        assert any(type(c) is KVCache for c in cache)

    def test_a_group_size_that_does_not_divide_fails_in_mid_conversation(
        self, model: Any
    ):
        """Why ``run`` looks before: mlx-lm comes to it at ``--quantized-kv-start``."""
        with pytest.raises(ValueError, match="divisible by the quantization group"):
            self.steps(model, kv_bits=8, kv_group_size=64)

    def test_through_the_server(self, model: Any, tokenizer: Any):
        options = ("--kv-bits", "8", "--kv-group-size", "32")
        said = []
        for more in ((), (*options, "--quantized-kv-start", "0")):
            with serve_script(model, tokenizer, *more) as server:
                reply = server.client().completions.create(
                    model="default_model", prompt="hello", max_tokens=4
                )
                said.append(reply.choices[0].text)
                held = server.generator.prompt_cache
                assert len(held) > 0
        assert said[0] == said[1]


def test_max_kv_size_is_ignored_by_mlx_lm(model: Any):
    kinds = [type(c) for c in make_prompt_cache(model, max_kv_size=16)]
    assert kinds == [type(c) for c in make_prompt_cache(model)]


def test_a_template_ends_the_stock_server(tmp_path: Path):
    """Loading says why; the server's own way is to live on without a model."""
    from kimi_k3.errors import TokenizerError

    build = write_t1(tmp_path / "build", tokenizer=True)
    argv = ["server", "--model", str(build), "--chat-template", "{{ messages }}"]
    made: list[Any] = []
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(mlx_lm.server, "run", lambda host, port, it: made.append(it)),
    ):
        mlx_lm.server.main()
    with pytest.raises(TokenizerError, match="not rendered by Jinja; leave it out"):
        made[0].load_default()
