"""The function that MLX writes around the source of a kernel.

MLX's own generator is mlx/backend/common/metal_kernel.cpp; test_metalsim_mlx.py compares
this one with the text MLX prints.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

TYPE_NAMES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}

#: Inputs with fewer elements go to the constant address space.
MAX_CONSTANT_ELEMENTS = 8

#: Metal attributes and their types, in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

Template = Sequence[tuple[str, Any]]


class ArrayLike(Protocol):
    """What the signature needs to know of an input."""

    @property
    def dtype(self) -> mx.Dtype: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Parameter:
    """One kernel argument and the buffer behind it.

    ``kind`` is data, shape, strides or ndim of input ``index``, or output ``index``.
    """

    type: str
    reference: str
    name: str
    index: int
    kind: str


@dataclass(frozen=True)
class Function:
    """The generated text: ``header + prototype + body``; ``name`` has its arguments."""

    name: str
    header: str
    prototype: str
    body: str

    @property
    def text(self) -> str:
        return self.header + self.prototype + self.body


def parameters(
    source: str,
    inputs: Sequence[tuple[str, ArrayLike]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    atomic_outputs: bool,
) -> list[Parameter]:
    """The arguments of the kernel in order; shapes and strides only where named."""
    result = []
    for i, (name, array) in enumerate(inputs):
        space = "constant" if array.size < MAX_CONSTANT_ELEMENTS else "device"
        kind = f"const {space} {TYPE_NAMES[array.dtype]}"
        result.append(Parameter(kind, "*" if array.ndim else "&", name, i, "data"))
        if not array.ndim:
            continue
        for suffix, type_name, reference in (
            ("shape", "int", "*"),
            ("strides", "int64_t", "*"),
            ("ndim", "int", "&"),
        ):
            if f"{name}_{suffix}" in source:
                kind = f"const constant {type_name}"
                side = f"{name}_{suffix}"
                result.append(Parameter(kind, reference, side, i, suffix))
    for i, (name, dtype) in enumerate(outputs):
        type_name = TYPE_NAMES[dtype]
        if atomic_outputs:
            type_name = f"atomic<{type_name}>"
        result.append(Parameter(f"device {type_name}", "*", name, i, "output"))
    return result


def _template_argument(value: Any) -> tuple[str, str]:
    """Kind and text of a template argument."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    return "typename", TYPE_NAMES[value]


def generate(
    name: str,
    source: str,
    header: str,
    inputs: Sequence[ArrayLike],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
    arguments: Sequence[Parameter],
) -> Function:
    """The whole function, as MLX writes it up to ``template [[host_name``."""
    template_arguments = [(n, *_template_argument(v)) for n, v in template]
    instance = ""
    if template_arguments:
        instance = f"<{', '.join(v for _, _, v in template_arguments)}>"
    function = f"custom_kernel_{name}"
    if instance:
        function += "_" + re.sub("[<>]", "_", instance.replace(", ", "_"))[:-1]
    for array in inputs:
        small = "c" if array.size < MAX_CONSTANT_ELEMENTS else ""
        function += "_" + TYPE_NAMES[array.dtype] + (small if array.ndim else "s")
    function += "".join("_" + TYPE_NAMES[dtype] for dtype in output_dtypes)

    lines = [
        f"  {p.type}{p.reference} {p.name} [[buffer({i})]]"
        for i, p in enumerate(arguments)
    ]
    lines += [f"  {kind} {a} [[{a}]]" for a, kind in ATTRIBUTES.items() if a in source]
    prototype = f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n"
    if template_arguments:
        names = ", ".join(f"{kind} {n}" for n, kind, _ in template_arguments)
        prototype = f"template <{names}>\n{prototype}"
    return Function(function + instance, header, prototype, source + "\n}\n")
