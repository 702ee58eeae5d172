"""Which predictions are judged, where they stand, and in which language."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation_cases import samples_of
from tokenizer_folders import write_tk

from kimi_k3.build.samples import Samples, load_tokenizer
from kimi_k3.errors import EvaluationError
from kimi_k3.evaluation.languages import language_of
from kimi_k3.evaluation.scored import Scored
from kimi_k3.evaluation.spans import spans_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tk(tmp_path_factory.mktemp("tk"))[0]


@pytest.fixture(scope="module")
def tk(folder: Path) -> Any:
    return load_tokenizer(folder)


def samples(folder: Path, documents: list[list[int]]) -> Samples:
    owners = np.array(documents)
    tokens = np.arange(owners.size).reshape(owners.shape) % 256
    return samples_of(folder, tokens, owners)


def by_hand(found: Samples) -> list[tuple[int, int, int, int, int]]:
    """Row, column, target, document and position of what is judged, token by token."""
    judged = []
    for row, owners in enumerate(found.documents.tolist()):
        seen = 0
        for column, owner in enumerate(owners):
            first = column == 0 or owners[column - 1] != owner
            seen = 1 if first else seen + 1
            last = column == len(owners) - 1
            if owner >= 0 and not last and owners[column + 1] == owner:
                target = int(found.tokens[row, column + 1])
                judged.append((row, column, target, owner, seen))
    return judged


CASES = {
    "one-row": [[0, 0, 0, 0]],
    "two-documents": [[0, 0, 1, 1, 1]],
    "goes-on-in-the-next-row": [[0, 0, 0], [0, 0, 1], [1, 1, 2]],
    "padding": [[0, 0, -1, -1], [1, 1, 1, -1]],
    "documents-of-one-token": [[0, 1, 2, 2, 3]],
    "windows": [[0, 0, 0, -1], [1, -1, -1, -1], [2, 2, 2, 2]],
    "comes-again": [[0, 0, 1, 0, 0], [1, 1, 0, 0, 0]],
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_judged(name: str, folder: Path, tk: Any):
    given = samples(folder, CASES[name])
    found = Scored.of(given, tk)
    got = zip(
        *(found.rows, found.columns, found.targets, found.document, found.position),
        strict=True,
    )
    assert list(got) == by_hand(given)
    owners = given.corpus_of_document[found.document]
    assert found.corpus.tolist() == owners.tolist()
    for array in (found.span, found.language):
        assert array.shape == found.rows.shape


def test_nothing_to_judge(folder: Path, tk: Any):
    for documents in ([[0], [0]], [[0, 1, 2]], [[0, -1], [1, -1]]):
        with pytest.raises(EvaluationError, match="nothing to predict"):
            Scored.of(samples(folder, documents), tk)


def test_positions_begin_anew_in_each_row(folder: Path, tk: Any):
    """A row that goes on with a document has no view of the row before."""
    found = Scored.of(samples(folder, [[0, 0, 0, 0], [0, 0, 1, 1]]), tk)
    assert found.position.tolist() == [1, 2, 3, 1, 1]


def test_nothing_follows_the_end_of_a_document(folder: Path, tk: Any):
    """A document that a short corpus repeats begins again behind its end."""
    end = tk.convert_tokens_to_ids("[EOS]")
    tokens = np.array([[5, 6, end, 5, 6, end]])
    found = Scored.of(samples_of(folder, tokens, np.zeros((1, 6), int)), tk)
    assert found.targets.tolist() == [6, end, 6, end]
    assert found.columns.tolist() == [0, 1, 3, 4]


def test_the_span_is_that_of_the_predicted_token(folder: Path, tk: Any):
    """The marker that opens an answer is judged as the model's, not as what precedes."""
    ids = tk.apply_chat_template(
        [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}],
        tokenize=True,
        add_generation_prompt=False,
    )
    tokens, owners = np.array([ids]), np.zeros((1, len(ids)), int)
    found = Scored.of(samples_of(folder, tokens, owners), tk)
    assert found.targets.tolist() == ids[1:]
    spans = spans_of(tokens, owners, tk)[0]
    assert found.span.tolist() == spans[1:].tolist()
    assert found.span.tolist() != spans[:-1].tolist()


TEXTS = {
    "int main(void) { return 0; }": "Latin",
    "Привет, как дела?": "Cyrillic",
    "你好，世界": "Han",
    "これは日本語の文です": "Japanese",
    "日本語カタカナ": "Japanese",
    "한국어": "Hangul",
    "1234 + 5 = ?": "other",
    "": "other",
    "аб ab": "Cyrillic",
}


@pytest.mark.parametrize("text", TEXTS)
def test_language_of_a_text(text: str):
    assert language_of(text) == TEXTS[text]
    assert language_of(text[::-1]) == TEXTS[text]


def test_languages_of_documents(folder: Path, tk: Any):
    """Characters whose bytes lie in two rows, and ids that are no text, included."""
    texts = ["int x", "Привет мир", "你好世界", "1 + 2 = 3; 4"]
    ids = [tk.encode(text, split_special_tokens=True) for text in texts]
    ids[0] = [*ids[0], tk.eos_token_id]
    flat = np.array([token for part in ids for token in part])
    owners = np.repeat(np.arange(4), [len(part) for part in ids])
    missing = -len(flat) % 7
    tokens = np.pad(flat, (0, missing)).reshape(-1, 7)
    documents = np.pad(owners, (0, missing), constant_values=-1).reshape(-1, 7)
    found = Scored.of(samples_of(folder, tokens, documents), tk)
    assert found.languages == ("Cyrillic", "Han", "Latin", "other")
    of_document = dict(
        zip(found.document.tolist(), found.language.tolist(), strict=True)
    )
    assert of_document == {0: 2, 1: 0, 2: 1, 3: 3}
