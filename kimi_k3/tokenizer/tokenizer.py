"""Kimi K3's tokenizer as transformers and mlx-lm want one: tiktoken, no remote code.

What becomes a control id is decided in :meth:`TikTokenTokenizer._ids_of`, and nowhere
else: text that spells a marker is text unless the caller says otherwise.
"""

import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer
from transformers.utils.generic import PaddingStrategy

from ..errors import TokenizerError
from . import TOKENIZER_DEFAULTS, auto
from .bpe import Bpe, printable
from .decoded import DecodedText
from .files import (
    CONFIG_FILE,
    EOS_NAME,
    MARKERS,
    VOCAB_FILE,
    check_named_tokens,
    control_names,
    read_ranks,
    read_tokenizer_config,
    stated_end_ids,
)
from .media import check_expanded
from .options import chat_options, take_layout
from .prompt import Piece, RenderedPrompt
from .xtml import OPEN, bare_tags, render

#: Stands for a template: hosts take a tokenizer without one for a model without chat.
#: Whoever renders it by mistake is told so instead of getting a wrong prompt.
NO_TEMPLATE = (
    "{{ raise_exception('Kimi K3 conversations are rendered by kimi-k3-mlx, not by a "
    "Jinja template: call tokenizer.apply_chat_template.') }}"
)

#: How a hand-written conversation begins; see ``_ids_of``.
_XTML_START = f"{OPEN.text}message "

# Where files came from, which transformers adds to a tokenizer's own settings.
_ORIGIN = ("is_local", "local_files_only", "tokenizer_file", "vocab_file")


class TikTokenTokenizer(PreTrainedTokenizer):
    """Ranks of ``tiktoken.model`` and the 256 control ids above them.

    ``added_tokens_decoder`` names some of the control ids; the others are
    ``<|reserved_token_N|>``. The vocabulary is fixed: no tokens can be added.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab_file: str | Path | None = None,
        added_tokens_decoder: dict[int, AddedToken] | None = None,
        chat_template: Any = None,
        **kwargs: Any,
    ):
        folder = kwargs.get("name_or_path", "the checkpoint")
        if vocab_file is None:
            raise TokenizerError(
                f"{folder} has no {VOCAB_FILE}, which holds Kimi K3's vocabulary; take "
                "it from the checkpoint's own repository."
            )
        self.vocab_file = str(vocab_file)
        ranks = read_ranks(Path(vocab_file))
        named = {key: str(token) for key, token in (added_tokens_decoder or {}).items()}
        self._bpe = Bpe(ranks, control_names(named, len(ranks)))
        self._markers = {
            "".join(piece.text for piece in pieces): self._ids_of_pieces(pieces)
            for pieces in bare_tags()
        }
        self._added_tokens_decoder = {
            token_id: AddedToken(name, normalized=False, special=True)
            for name, token_id in self._bpe.controls.items()
        }
        self._checkpoint_template = (
            None if chat_template == NO_TEMPLATE else chat_template
        )
        for key in (*_ORIGIN, "split_special_tokens", "clean_up_tokenization_spaces"):
            kwargs.pop(key, None)
        check_named_tokens(kwargs, self._bpe.controls)
        super().__init__(**kwargs)
        self.chat_template = NO_TEMPLATE
        # None lets _ids_of tell a caller's False from the default.
        self.split_special_tokens = None

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *init_inputs: Any, **kwargs: Any
    ) -> Any:
        """The tokenizer of a K3 checkpoint, from a folder or the hub.

        Other models that name a class like ours get what transformers has for them.
        Raises TokenizerError naming the file that is missing, damaged or foreign.
        """
        where = pretrained_model_name_or_path
        if auto.model_type(where, **kwargs) not in (None, auto.MODEL_TYPE):
            return auto.load_as_if_absent(where, *init_inputs, **kwargs)
        try:
            if kwargs.get("chat_template") is not None:
                raise TokenizerError(
                    "a chat template was given for Kimi K3, whose conversations are not "
                    "rendered by Jinja; leave it out (--chat-template in a server)."
                )
            if Path(where).is_dir():
                read_tokenizer_config(Path(where))
            tokenizer = super().from_pretrained(where, *init_inputs, **kwargs)
        finally:
            auto.withdraw()
        tokenizer._stop_on_every_end(chosen="eos_token" in kwargs)
        return tokenizer

    def _stop_on_every_end(self, *, chosen: bool) -> None:
        """Arrange that mlx-lm stops on each of :attr:`end_ids`, whatever configs state.

        mlx-lm unites our ``eos_token_id`` with the ids stated in the checkpoint's
        config, or with the model's TOKENIZER_DEFAULTS if that states none.
        """
        ends = self.end_ids
        TOKENIZER_DEFAULTS["eos_token_ids"][:] = ends
        stated = stated_end_ids(self._folder)
        missing = [end for end in ends if end not in stated]
        if stated and missing and not chosen:
            end_of_msg = self._bpe.controls[MARKERS[-1]]
            one = end_of_msg if end_of_msg in missing else missing[0]
            self.eos_token = self._names[one]

    @property
    def _folder(self) -> Path:
        return Path(self.vocab_file).parent

    @property
    def end_ids(self) -> list[int]:
        """Every id that ends a turn: ``<|end_of_msg|>``, ``[EOS]`` and ``eos_token``."""
        names = [MARKERS[-1], EOS_NAME, self.eos_token]
        controls = self._bpe.controls
        return sorted({controls[name] for name in names if name in controls})

    # Text to ids

    def _ids_of(
        self, text: str, split: bool | None, *, whole_prompt: bool
    ) -> list[int]:
        """Ids of ``text``; the one place that decides what becomes a control id.

        - a rendered prompt: what the renderer placed, and only that;
        - ``split`` (transformers' ``split_special_tokens``) True: nothing; False: every
          control name, for callers that render by themselves;
        - decoded text: the control ids that it was made of, and only those;
        - by default: a text that is exactly one of XTML's tags without attributes, as
          mlx-lm asks for them (where thinking or tool calls start and end);
        - ``whole_prompt`` (a raw completion, with special tokens asked for): the four
          markers, if the text begins like a hand-written conversation.
        """
        if isinstance(text, RenderedPrompt):
            check_expanded(text)
            return self._ids_of_pieces(text.pieces)
        if split is not None:
            return (
                self._bpe.encode(text)
                if split
                else self._bpe.encode_with_controls(text)
            )
        if isinstance(text, DecodedText):
            return self._ids_of_pieces(text.pieces)
        if (marker := self._markers.get(text)) is not None:
            return list(marker)
        if whole_prompt and text.startswith(_XTML_START):
            return self._bpe.encode_with_controls(text, MARKERS)
        return self._bpe.encode(text)

    def _ids_of_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Raises TokenizerError for a mark that the checkpoint does not name."""
        controls = self._bpe.controls
        ids: list[int] = []
        for text, control in pieces:
            if not control:
                ids += self._bpe.encode(text)
            elif text in controls:
                ids.append(controls[text])
            else:
                raise TokenizerError(
                    f"the prompt needs {text}, which {self._folder} gives to no id; "
                    f"take {CONFIG_FILE} from the checkpoint's own repository."
                )
        return ids

    def _encode_plus(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        **kwargs: Any,
    ) -> BatchEncoding:
        if not isinstance(text, str):
            return super()._encode_plus(
                text, text_pair, add_special_tokens=add_special_tokens, **kwargs
            )
        split = kwargs.pop("split_special_tokens", None)
        padding = kwargs.pop("padding_strategy", PaddingStrategy.DO_NOT_PAD)
        truncation = kwargs.pop("truncation_strategy", None)
        pair = None
        if text_pair is not None:
            pair = self._ids_of(text_pair, split, whole_prompt=False)
        return self.prepare_for_model(
            self._ids_of(text, split, whole_prompt=add_special_tokens),
            pair_ids=pair,
            add_special_tokens=add_special_tokens,
            padding=padding.value,
            truncation=False if truncation is None else truncation.value,
            prepend_batch_axis=True,
            **kwargs,
        )

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        split = kwargs.get("split_special_tokens")
        return self.convert_ids_to_tokens(self._ids_of(text, split, whole_prompt=False))

    # Ids to text

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of ``ids``, which need not be whole characters."""
        return self._bpe.bytes_of(ids)

    # Hosts read answers through this, so it tells control ids from text; see DecodedText.
    def _decode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        first = self._bpe.first_control
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id < first]
        controls = [i for i, token_id in enumerate(ids) if token_id >= first]
        pieces: list[tuple[str, bool]] = []
        done = 0
        for place in [*controls, len(ids)]:
            ordinary = self.bytes_of(ids[done:place])
            pieces.append((ordinary.decode("utf-8", errors="replace"), False))
            name = self.bytes_of(ids[place : place + 1])
            pieces.append((name.decode(), bool(name)))
            done = place + 1
        return DecodedText.of(pieces)

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self._bpe)

    def __len__(self) -> int:
        return len(self._bpe)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self._bpe.controls)

    @property
    def all_special_ids(self) -> list[int]:
        return list(self._bpe.controls.values())

    @cached_property
    def _names(self) -> list[str]:
        """Names of all ids, ranks as byte-level vocabularies write them."""
        bpe = self._bpe
        return [*map(printable, bpe.bytes_by_id[: bpe.first_control]), *bpe.controls]

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        # Should a rank spell a control name, the name means the control id.
        return {name: i for i, name in enumerate(self._names)} | self._bpe.controls

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocabulary)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)

    def _convert_id_to_token(self, index: int) -> str:
        self.bytes_of([index])
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        ids = [self._convert_token_to_id(token) for token in tokens]
        return self._decode([token_id for token_id in ids if token_id is not None])

    def _add_tokens(
        self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False
    ) -> int:
        unknown = [str(t) for t in new_tokens if str(t) not in self._bpe.controls]
        if unknown:
            raise TokenizerError(
                f"{unknown[0]!r} cannot be added: Kimi K3's vocabulary is fixed at "
                f"{len(self)} ids. Use one of the <|reserved_token_N|>."
            )
        return 0

    # Saving

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        target = Path(save_directory) / f"{prefix}{VOCAB_FILE}"
        if not (target.exists() and target.samefile(self.vocab_file)):
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

    def save_chat_templates(
        self,
        save_directory: Any,
        tokenizer_config: dict[str, Any],
        filename_prefix: str | None,
        save_jinja_files: bool,
    ) -> Any:
        """Write the checkpoint's own templates, if it has any, and never ours."""
        tokenizer_config.pop("chat_template", None)
        self.chat_template = self._checkpoint_template
        try:
            return super().save_chat_templates(
                save_directory, tokenizer_config, filename_prefix, save_jinja_files
            )
        finally:
            self.chat_template = NO_TEMPLATE

    # Chat

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        conversation: Any,
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        return_dict: bool = False,
        thinking: Any = None,
        **kwargs: Any,
    ) -> Any:
        """A conversation as ids, or with ``tokenize=False`` as a string that knows them.

        ``conversation`` is a list of OpenAI-style messages or a list of such lists.
        Further options are those of :class:`ChatOptions`; with ``return_dict``,
        ``padding``, ``truncation``, ``max_length`` and ``return_tensors`` work as in
        transformers. Raises ChatError naming the message that cannot be rendered.
        """
        layout = take_layout(kwargs, bare=tokenize and not return_dict)
        options = chat_options(
            thinking=thinking,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        batched = _is_batch(conversation)
        conversations = conversation if batched else [conversation]
        prompts = [RenderedPrompt(render(each, options)) for each in conversations]
        if not tokenize:
            return prompts if batched else prompts[0]
        encoded = self(
            [*prompts] if batched else prompts[0],
            add_special_tokens=False,
            **layout,
        )
        return encoded if return_dict else encoded["input_ids"]


def _is_batch(conversation: Any) -> bool:
    return (
        isinstance(conversation, list | tuple)
        and bool(conversation)
        and isinstance(conversation[0], list | tuple)
    )
