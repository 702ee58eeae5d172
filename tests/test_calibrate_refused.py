"""What a calibration refuses before it reads weights, and folders that hold one (B34)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibration_cases import CORPORA, results, samples_for, samples_of, write_source
from damage import copy_folder

import kimi_k3
from kimi_k3.build import calibrate as module
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.pass_progress import Progress
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.samples import Samples
from kimi_k3.errors import (
    CalibrationError,
    ConfigError,
    KimiK3Error,
    NotFiniteError,
    PartialResultError,
    SamplesError,
    ScratchError,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1")


@pytest.fixture(scope="module")
def samples(source: Path) -> Samples:
    return samples_for(source)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LayerStream, "_loaded", read)
    monkeypatch.setattr(LayerStream, "layers", read)


@pytest.mark.usefixtures("no_weights")
class TestRefused:
    """Errors before hours of work; nothing is left behind."""

    def refused(
        self, match: str, source: Path, samples: Any, out: Path, **settings: Any
    ) -> KimiK3Error:
        with pytest.raises(KimiK3Error, match=match) as caught:
            calibrate(source, samples, out, **settings)
        assert not out.exists()
        return caught.value

    def test_text_of_which_nothing_is_learnt(
        self, source: Path, samples: Samples, tmp_path: Path
    ):
        """B34: empty files, less than a row, only padding, a corpus without tokens."""
        out, text = tmp_path / "out", tmp_path / "text.txt"
        mix = tmp_path / "mix.toml"
        mix.write_text(
            'tokens = 64\nlength = 16\n[[corpus]]\nname = "a"\nshare = 1\n'
            'files = ["text.txt"]\n'
        )
        for content in ("", "\n \n", "short"):
            text.write_text(content)
            self.refused("corpus 'a'", source, mix, out)
        padding = np.full_like(samples.labels, -1)
        arrays = {"labels": padding, "documents": padding.astype(np.int32)}
        with pytest.raises(SamplesError, match="only padding"):
            replace(samples, **arrays)
        with pytest.raises(SamplesError, match="each must have a token"):
            replace(samples, corpora=(*CORPORA, "empty"))
        one = np.zeros((3, 1), int)
        self.refused("rows are of 1 token", source, samples_of("none", one, one), out)

    def test_samples_of_another_tokenizer(
        self, source: Path, samples: Samples, tmp_path: Path
    ):
        other = replace(samples, tokenizer="0" * 64)
        self.refused("made with another tokenizer", source, other, tmp_path / "out")
        other.save(tmp_path / "s.npz")
        self.refused("another tokenizer", source, tmp_path / "s.npz", tmp_path / "out")

    def test_ids_that_the_model_has_not(
        self, source: Path, samples: Samples, tmp_path: Path
    ):
        tokens = samples.tokens.copy()
        tokens[0, 3] = 576
        other = replace(samples, tokens=tokens)
        self.refused("token id 576", source, other, tmp_path / "out")

    def test_a_checkpoint_without_experts(self, samples: Samples, tmp_path: Path):
        folder = write_source(tmp_path / "dense", first_k_dense_replace=3)
        error = self.refused(
            "no layer .* routed experts", folder, samples, tmp_path / "out"
        )
        assert isinstance(error, ConfigError)

    def test_an_option_that_leaves_experts_out(
        self, source: Path, samples: Samples, tmp_path: Path
    ):
        folder = copy_folder(source, tmp_path / "top-p")
        config = json.loads((folder / "config.json").read_text())
        config["expert_top_p"] = 0.9
        (folder / "config.json").write_text(json.dumps(config))
        self.refused(r"expert_top_p \(0\.9\)", folder, samples, tmp_path / "out")

    def test_a_damaged_checkpoint(self, source: Path, samples: Samples, tmp_path: Path):
        folder = copy_folder(source, tmp_path / "short")
        shard = sorted(folder.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-10])
        self.refused(shard.name, folder, samples, tmp_path / "out")

    def test_settings(self, source: Path, samples: Samples, tmp_path: Path):
        out = tmp_path / "out"
        self.refused("step_tokens is 0", source, samples, out, step_tokens=0)
        self.refused("no shipped mix", source, "no-such-mix", out)

    def test_a_folder_with_other_files(
        self, source: Path, samples: Samples, tmp_path: Path
    ):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(CalibrationError, match=r"holds notes\.txt, and no"):
            calibrate(source, samples, tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
        (tmp_path / "file").write_text("")
        with pytest.raises(CalibrationError, match="cannot be written"):
            calibrate(source, samples, tmp_path / "file" / "out")


@pytest.fixture(scope="module")
def finished(
    source: Path, samples: Samples, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    calibrate(source, samples, out)
    return out


@pytest.mark.usefixtures("no_weights")
def test_a_finished_calibration_is_given_back(
    source: Path, samples: Samples, finished: Path
):
    before = results(finished)
    for restart in (False, True):
        said: list[str] = []
        table = calibrate(source, samples, finished, restart=restart, tell=said.append)
        assert said == [
            f"{finished} holds this calibration, finished; there is nothing to do."
        ]
        assert table.digest == SaliencyTable.load(finished).digest
    with pytest.raises(PartialResultError, match="tokens a step was 2048 and is 16"):
        calibrate(source, samples, finished, step_tokens=16)
    assert results(finished) == before
    assert not (finished / "partial").exists()


def test_a_damaged_result_is_made_again_only_if_asked(
    source: Path, samples: Samples, tmp_path: Path
):
    out = tmp_path / "out"
    calibrate(source, samples, out, moments=False)
    whole = results(out)
    (out / "saliency.npz").write_bytes(whole["saliency.npz"][:-9])
    with pytest.raises(PartialResultError, match=r"saliency\.npz .*--restart"):
        calibrate(source, samples, out, moments=False)
    assert (out / "saliency.npz").stat().st_size == len(whole["saliency.npz"]) - 9
    calibrate(source, samples, out, moments=False, restart=True)
    assert results(out) == whole


def test_kept_samples_that_are_damaged_are_named(source: Path, tmp_path: Path):
    mix, out = tmp_path / "mix.toml", tmp_path / "out"
    mix.write_text(
        "tokens = 32\nlength = 16\nheld_out = 0\n"
        '[[corpus]]\nname = "a"\nshare = 1\nfiles = ["text.txt"]\n'
    )
    (tmp_path / "text.txt").write_text("\n\n".join(f"{i} text" for i in range(40)))
    calibrate(source, mix, out, moments=False)
    (out / "samples.npz").write_bytes(b"none")
    with pytest.raises(PartialResultError, match=r"samples\.npz .*--restart"):
        calibrate(source, mix, out, moments=False)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("restart", [False, True])
def test_another_calibration_in_the_folder_is_named(
    source: Path, samples: Samples, finished: Path, tmp_path: Path, restart: bool
):
    other = copy_folder(source, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 1.5
    (other / "config.json").write_text(json.dumps(config))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("the source's fingerprint was", {"source": other}),
        ("the samples' fingerprint was", {"samples": samples_for(source, seed=1)}),
        ("moments was True and is False now", {"moments": False}),
        ("tokens a step was 2048 and is 24 now", {"step_tokens": 24}),
    ]
    for match, change in cases:
        settings = {"source": source, "samples": samples, "restart": restart} | change
        with pytest.raises(PartialResultError, match=match) as caught:
            calibrate(out=finished, **settings)
        assert "finished and stays as it is" in str(caught.value)


def test_an_unfinished_one_of_another_format_is_refused_or_discarded(
    source: Path, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.finished:
            raise Stop

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "TOOL", "kimi-k3-mlx 0.0.1")
        patch.setattr(module, "version", lambda _: "0.31.0")
        with pytest.raises(Stop):
            calibrate(source, samples, out, progress=stop)
    with pytest.raises(PartialResultError) as caught:
        calibrate(source, samples, out)
    assert "kimi-k3-mlx was 'kimi-k3-mlx 0.0.1' and is" in str(caught.value)
    assert "mlx was '0.31.0' and is" in str(caught.value)
    assert "--restart discards the partial results" in str(caught.value)
    table = calibrate(source, samples, out, restart=True)
    assert table.tokens.tolist() == samples.tokens_per_corpus.tolist()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".layers.1.block_sparse_moe.gate.weight", r"layer 1: mlp\.gate\.weight holds"),
        (".e_score_correction_bias", r"layer 1: mlp\.e_score_correction_bias holds"),
        (".embed_tokens.weight", "the embedding gives NaN"),
    ],
)
def test_weights_that_are_no_numbers(
    name: str, said: str, source: Path, samples: Samples, tmp_path: Path
):
    """A router passes over an expert whose score is NaN: it would look useless."""
    folder = copy_folder(source, tmp_path / "nan")
    for shard in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, mx.array] = mx.load(str(shard))  # type: ignore
        for key in tensors:
            if key.endswith(name):
                mask = mx.arange(tensors[key].size).reshape(tensors[key].shape)
                first = mask < tensors[key].shape[-1]
                nan = mx.array(float("nan")).astype(tensors[key].dtype)
                tensors[key] = mx.where(first, nan, tensors[key])
        mx.save_safetensors(str(shard), tensors, {"format": "pt"})
    ids = samples.tokens.copy()
    ids[0, 0] = 0
    with pytest.raises(NotFiniteError, match=said):
        calibrate(folder, replace(samples, tokens=ids), tmp_path / "out")


def test_going_on_needs_no_corpus(source: Path, tmp_path: Path):
    """The samples are kept: a text that changed meanwhile changes nothing."""
    mix, text = tmp_path / "mix.toml", tmp_path / "text.txt"
    mix.write_text(
        "tokens = 64\nlength = 16\nheld_out = 0\n"
        '[[corpus]]\nname = "a"\nshare = 1\nfiles = ["text.txt"]\n'
    )
    text.write_text("\n\n".join(f"{i} words of text {i}" for i in range(40)))
    out = tmp_path / "out"

    def stop(progress: Progress) -> None:
        if progress.finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(source, mix, out, progress=stop)
    text.unlink()
    table = calibrate(source, mix, out)
    assert table.corpora == ("a",)
    assert table.samples["fingerprint"] == Samples.load(out / "samples.npz").fingerprint


def test_a_disk_that_is_too_small_is_seen_before_the_first_layer(
    source: Path, samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    monkeypatch.setattr(LayerStream, "layers", None)
    with pytest.raises(ScratchError, match="has 10,000 bytes free"):
        calibrate(source, samples, tmp_path / "out")


def test_it_is_a_public_name():
    assert kimi_k3.calibrate is calibrate
