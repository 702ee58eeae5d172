"""Layers read one by one are those of the whole model; faults are named, not read."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_same
from damage import copy_folder
from golden_data import Case
from loading import load_stored
from mlx.utils import tree_flatten
from sparse_checkpoint import write_sparse_checkpoint
from streaming import reader_threads
from tiny_k3 import t1_config, write_t1, write_t2

from kimi_k3.build import layer_reader
from kimi_k3.build.layer_reader import LayerReader
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.checkpoint.names import OTHER_PARTS, layer_of
from kimi_k3.checkpoint.source_layout import full_size_config, layer_tensors

Flat = dict[str, mx.array]

PREFIX = "language_model.model"

#: T1 in variants that a config may ask for.
VARIANTS: dict[str, dict[str, Any]] = {
    "T1": {},
    "tied": {"tie_word_embeddings": True},
    "no-residual-mix": {"attn_res_block_size": None},
}


def flat(module: Any, at: str) -> Flat:
    return {f"{at}.{name}": a for name, a in tree_flatten(module.parameters())}  # type: ignore


def streamed_parameters(stream: LayerStream) -> Flat:
    """Every parameter, copied while its part is loaded."""
    found: Flat = {}

    def keep(parameters: Flat) -> None:
        copies = {name: mx.array(array) for name, array in parameters.items()}
        mx.eval(copies)
        found.update(copies)

    with stream.embed():
        keep(flat(stream.model.model.embed_tokens, f"{PREFIX}.embed_tokens"))
    for index, layer, _ in stream.layers():
        keep(flat(layer, f"{PREFIX}.layers.{index}"))
    with stream.output() as text:
        keep(flat(text.norm, f"{PREFIX}.norm"))
        if text.use_attn_res:
            for name in ("output_attn_res_proj", "output_attn_res_norm"):
                keep(flat(text[name], f"{PREFIX}.{name}"))
    if not stream.args.tie_word_embeddings:
        with stream.head() as head:
            keep(flat(head, "language_model.lm_head"))
    return found


def check_streamed(folder: Path) -> None:
    """All parameters as the whole model has them, bit for bit, and none left over."""
    want: Any = dict(tree_flatten(load_stored(folder).parameters()))  # type: ignore
    got = streamed_parameters(LayerStream(folder))
    assert set(got) == set(want), sorted(set(got) ^ set(want))[:4]
    for name, array in want.items():
        assert_same(got[name], array, where=name)


@pytest.fixture(scope="module")
def t1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("t1"))


@pytest.fixture
def copy(t1: Path, tmp_path: Path) -> Path:
    """A T1 that may be damaged."""
    return copy_folder(t1, tmp_path / "copy")


def test_parameters_of_a_build(build: Case):
    check_streamed(build.folder)


def test_parameters_of_a_source(golden: Case):
    check_streamed(golden.folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_of_a_variant(variant: str, tmp_path: Path):
    check_streamed(write_t1(tmp_path, **VARIANTS[variant]))


def test_parameters_of_two_banks(tmp_path: Path):
    check_streamed(write_t2(tmp_path))


def test_experts_read_to_a_wrong_place_are_noticed(t1, monkeypatch):
    """Broken twin: the first expert's matrices go where the second's belong."""
    pieces = LayerReader._pieces

    def swapped(reader: LayerReader, names: list[str]) -> list[Any]:
        places = {0: 1, 1: 0}
        return [
            type(p)(
                p.name,
                p.tensor,
                p.target,
                p.row if p.row is None else places.get(p.row, p.row),
            )
            for p in pieces(reader, names)
        ]

    monkeypatch.setattr(LayerReader, "_pieces", swapped)
    with pytest.raises(AssertionError, match=r"switch_mlp.*values differ"):
        check_streamed(t1)


def test_every_tensor_is_read_once(build: Case, monkeypatch):
    reads: Counter[str] = Counter()
    fill = LayerReader._fill

    def counted(reader: Any, file: Any, piece: Any, *rest: Any) -> None:
        reads[piece.name] += 1
        fill(reader, file, piece, *rest)

    monkeypatch.setattr(LayerReader, "_fill", counted)
    stream = LayerStream(build.folder)
    assert not reads
    streamed_parameters(stream)
    text = {
        name: tensor.nbytes
        for name, tensor in stream.folder.tensors.items()
        if not name.startswith(OTHER_PARTS)
    }
    assert reads == Counter(dict.fromkeys(text, 1))
    assert stream.bytes_read == sum(text.values())


def test_bytes_are_those_of_the_layer(t1: Path):
    stream = LayerStream(t1)
    for index, _, nbytes in stream.layers():
        stored = [
            tensor.nbytes
            for name, tensor in stream.folder.tensors.items()
            if f".layers.{index}." in name
        ]
        assert nbytes == stream.nbytes(index) == sum(stored) > 0
    assert stream.bytes_read == sum(map(stream.nbytes, range(stream.num_layers)))


def test_layers_from_the_middle_on(t1: Path):
    stream = LayerStream(t1)
    assert [index for index, *_ in stream.layers(3)] == [3, 4]
    assert stream.bytes_read == stream.nbytes(3) + stream.nbytes(4)
    assert list(stream.layers(5)) == []


def test_only_the_layer_in_use_has_its_weights(t1: Path):
    stream = LayerStream(t1)
    before = flat(stream.model, "model")
    for index, layer, _ in stream.layers():
        # Wrapped from outside, and left so.
        layer.self_attn = lambda *_: None  # type: ignore[assignment]
        changed = {
            name
            for name, array in flat(stream.model, "model").items()
            if array is not before[name]
        }
        assert changed
        assert all(f".layers.{index}." in name for name in changed)
    after = flat(stream.model, "model")
    assert all(after[name] is before[name] for name in after)


def test_parameters_can_be_cast(t1: Path):
    for index, layer, _ in LayerStream(t1, dtype=mx.float32).layers():
        dtypes = {array.dtype for array in flat(layer, "").values()}
        packed = {mx.uint32, mx.uint8} if index else set()
        assert dtypes == {mx.float32} | packed


class Reads:
    """Tells which layers have been read, and by which threads."""

    def __init__(self, patch: pytest.MonkeyPatch, layers: int):
        self.done = [threading.Event() for _ in range(layers)]
        self.threads: set[threading.Thread] = set()
        read = LayerReader.read

        def noted(reader: Any, names: list[str], *rest: Any) -> Any:
            found = read(reader, names, *rest)
            self.threads.add(threading.current_thread())
            layer = layer_of(names[0])
            assert layer is not None
            self.done[layer].set()
            return found

        patch.setattr(LayerReader, "read", noted)

    def wait(self, layer: int) -> None:
        """Until ``layer`` has been read, if there is one."""
        for event in self.done[layer : layer + 1]:
            assert event.wait(timeout=60)


def test_the_next_layer_is_read_while_one_is_in_use(t1: Path, monkeypatch):
    """What is read ahead arrives while the layer before is held, and no more does."""
    reads = Reads(monkeypatch, 5)
    for index, *_ in LayerStream(t1).layers():
        reads.wait(index + 1)
        assert not any(event.is_set() for event in reads.done[index + 2 :])
    assert threading.main_thread() not in reads.threads


def test_no_thread_is_left_when_the_caller_stops(t1: Path, monkeypatch):
    begun = threading.Event()
    fill = LayerReader._fill

    def slow(reader: Any, *rest: Any) -> None:
        if ".layers.1." in rest[1].name:
            begun.set()
            threading.Event().wait(0.02)  # 200 tensors of this would take 4 seconds
        fill(reader, *rest)

    monkeypatch.setattr(LayerReader, "_fill", slow)
    layers = LayerStream(t1).layers()
    next(layers)
    assert begun.wait(timeout=30)
    assert len(reader_threads()) == 1
    layers.close()  # type: ignore[attr-defined]
    assert reader_threads() == []


def peak_of_a_pass(folder: Path, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most memory in use during a pass over the layers; bytes of the largest layer."""
    stream = LayerStream(folder)
    reads = Reads(patch, stream.num_layers)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for index, *_ in stream.layers():
        reads.wait(index + 1)
    return mx.get_peak_memory() - before, stream.nbytes(1)


def test_memory_does_not_depend_on_depth(tmp_path: Path, monkeypatch):
    """Two layers and no stacked copy beside them, whether there are 3 layers or 12."""
    peaks = []
    for layers in (3, 12):
        kinds = {"kda_layers": list(range(1, layers + 1)), "full_attn_layers": []}
        config = t1_config(
            num_hidden_layers=layers,
            linear_attn_config=kinds,
            moe_intermediate_size=512,
            routed_expert_hidden_size=512,
            num_shared_experts=0,
        )
        folder = tmp_path / str(layers)
        folder.mkdir()
        write_sparse_checkpoint(folder, config)
        with monkeypatch.context() as patch:
            peaks.append(peak_of_a_pass(folder, patch))
    (few, layer), (many, _) = peaks
    assert layer > 1 << 22
    assert many < few + 0.1 * layer
    assert 1.9 * layer < many < 2.1 * layer


def test_real_size_opens_in_seconds_without_memory(tmp_path: Path):
    """The release with 32 experts a layer: 170 GB of which nothing is on the disk."""
    config = full_size_config()
    config["text_config"]["num_experts"] = 32
    folder = write_sparse_checkpoint(tmp_path, config)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    stream = LayerStream(folder)
    assert stream.num_layers == 93
    specs = layer_tensors(stream.args, 1, (128,))
    assert stream.nbytes(1) == sum(spec.nbytes for spec in specs) > 1e9
    with stream.output() as text:
        assert text.norm.weight.shape == (7168,)
    assert stream.bytes_read == 3 * 7168 * 2
    assert mx.get_peak_memory() - before < 1 << 20


def test_fingerprint(t1: Path, copy: Path):
    name = LayerStream(t1).fingerprint
    assert LayerStream(copy).fingerprint == name
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config.replace("1e-05", "2e-05"))
    assert LayerStream(copy).fingerprint != name


def test_large_tensors_are_read_in_several_pieces(t1: Path, monkeypatch):
    monkeypatch.setattr(layer_reader, "READ_BYTES", 100)
    check_streamed(t1)


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    yield
    assert reader_threads() == []
