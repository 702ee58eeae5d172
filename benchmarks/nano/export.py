"""Write a trained nano as a K3 source checkpoint.

python benchmarks/nano/export.py --data DATA --run RUN --out FOLDER

The routed experts are rounded to MXFP4; convolutions, decays, biases of the router and
output norms stay float32, everything else becomes bf16, as in the release. One file
without an index, tensors in the order of the release, so the bytes are always the same.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from settings import LINEAR, TEXT

from kimi_k3.checkpoint import mxfp4
from kimi_k3.checkpoint.source_layout import source_tensors
from kimi_k3.config import ModelArgs
from kimi_k3.nano.config import small_config

_DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32}

#: What a source name ends with, and where the trained model keeps it.
_RENAMED = (
    (r"^language_model\.(model\.)?", ""),
    (r"block_sparse_moe\.gate\.e_score", "mlp.e_score"),
    (r"block_sparse_moe\.", "mlp."),
    (r"_res_(norm|proj)\.weight$", r"_res.\1"),
)
_EXPERT = re.compile(r"(.*)mlp\.experts\.(\d+)\.(w[123])\.weight_packed$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in ("data", "run", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    state = torch.load(options.run / "model.pt", weights_only=True)
    config = small_config(text=TEXT, linear=LINEAR)
    write_checkpoint(options.out, state, config, options.data / "tokenizer")
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {size} bytes")


def write_checkpoint(
    out: Path, state: dict[str, torch.Tensor], config: dict, tokenizer: Path
) -> None:
    """``state`` in the source format, beside the files of ``tokenizer``."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for spec in source_tensors(ModelArgs.from_dict(config)):
        if spec.name.endswith(".weight_scale"):
            continue
        name = _trained_name(spec.name)
        if found := _EXPERT.match(name):
            layer, expert, matrix = found.groups()
            weight = state[f"{layer}mlp.{matrix}"][int(expert)]
            codes, scales = mxfp4.quantize(weight.numpy())
            tensors[spec.name] = torch.from_numpy(codes)
            scale_name = spec.name.replace("weight_packed", "weight_scale")
            tensors[scale_name] = torch.from_numpy(scales)
        else:
            stored = _stored(state[name], spec.shape)
            tensors[spec.name] = stored.to(_DTYPE[spec.dtype]).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in tokenizer.glob("*"):
        if file.name != "config.json":
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def _trained_name(source_name: str) -> str:
    for pattern, replacement in _RENAMED:
        source_name = re.sub(pattern, replacement, source_name)
    return source_name


def _stored(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` in the stored shape; ``A_log`` is padded with zeros behind the heads."""
    if tensor.numel() < torch.Size(shape).numel():
        padded = tensor.new_zeros(shape)
        padded[: len(tensor)] = tensor
        return padded
    return tensor.reshape(shape)


if __name__ == "__main__":
    main()
