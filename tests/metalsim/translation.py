"""Metal as C++: the few lexical rewrites that clang needs; line numbers are kept."""

import re
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from .signature import ATTRIBUTES, Function, Parameter
from .toolchain import MetalSimError

#: Expression on the executor's ``ThreadAttributes* t`` for each attribute.
_COUNTS = {
    "dispatch_quadgroups_per_threadgroup": "(t->dispatch_count() + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "(t->dispatch_count() + 31) / 32",
    "grid_origin": "uint3(0)",
    "quadgroup_index_in_threadgroup": "t->index_in_threadgroup / 4",
    "quadgroups_per_threadgroup": "t->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "t->simdgroup_index",
    "simdgroups_per_threadgroup": "t->simdgroups",
    "thread_execution_width": "32",
    "thread_index_in_quadgroup": "t->index_in_threadgroup % 4",
    "thread_index_in_simdgroup": "t->index_in_simdgroup",
    "thread_index_in_threadgroup": "t->index_in_threadgroup",
    "threads_per_simdgroup": "32",
}
_TRIPLES = {
    "dispatch_threads_per_threadgroup": "dispatch_threads",
    "grid_size": "grid_size",
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_threadgroup",
    "threadgroup_position_in_grid": "threadgroup_position",
    "threadgroups_per_grid": "threadgroups_per_grid",
    "threads_per_grid": "grid_size",
    "threads_per_threadgroup": "threads_per_threadgroup",
}
_VALUES = _COUNTS | {
    attribute: f"uint3(t->{field}[0], t->{field}[1], t->{field}[2])"
    for attribute, field in _TRIPLES.items()
}

_THREADGROUP = re.compile(
    r"\bthreadgroup\s+(?:const\s+)?"
    r"((?:[A-Za-z_][\w:]*)(?:\s*<[^;{}()]*?>)?(?:\s+(?=[A-Za-z_]\w*\s*<))?)"
    r"\s+(?=[A-Za-z_])"
)
_DECLARATOR = re.compile(r"\s*([A-Za-z_]\w*)((?:\s*\[[^\]]*\])*)\s*([,;])")
#: A parameter written as an array: clang wants a pointer.
_ARRAY_PARAMETER = re.compile(
    r"\b((?:constant|device|threadgroup)\s[^;{}()\[\],]*?)(\b[A-Za-z_]\w*)"
    r"\s*\[[^\]]*\](?=\s*[,)])"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FLOAT = re.compile(
    r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)"
    r"(bf|BF|[hH]|[fF])?(?![\w.])"
)
#: A literal without suffix is a float in Metal.
_SUFFIX = {"h": "half({}f)", "bf": "bfloat({}f)", "f": "{}f", "": "{}f"}


def _share_threadgroup_variables(text: str) -> str:
    """``threadgroup float x[8];`` → a reference to memory that the fibers share."""
    out, at, count = [], 0, 0
    for match in _THREADGROUP.finditer(text):
        position, declarators, item = match.end(), [], None
        while item := _DECLARATOR.match(text, position):
            declarators.append(item.groups()[:2])
            position = item.end()
            if item.group(3) == ";":
                break
        if not item or match.start() < at:
            continue  # a pointer, or a function parameter
        out.append(text[at : match.start()])
        for name, extents in declarators:
            count += 1
            out.append(
                f"typedef {match.group(1)} {name}_storage{extents}; "
                f"threadgroup {name}_storage& {name} = "
                f'*threadgroup_variable<{name}_storage>({count}, "{name}"); '
            )
        out.append("\n" * text.count("\n", match.start(), position))
        at = position
    return "".join(out) + text[at:]


def _float_literal(match: re.Match[str]) -> str:
    return _SUFFIX[(match.group(2) or "").lower()].format(match.group(1))


def rewrite(text: str) -> str:
    """Metal text as C++ text of as many lines."""
    text = _COMMENT.sub(lambda m: "\n" * m.group().count("\n"), text)
    text = _share_threadgroup_variables(text)
    text = _ARRAY_PARAMETER.sub(r"\1* \2", text)
    text = _FLOAT.sub(_float_literal, text)
    return re.sub(r"\bvec\s*<([^<>]*)>\s*\(", r"make_vec<\1>(", text)


def check_subset(source: str) -> None:
    """Raise MetalSimError for what clang takes and Metal may not."""
    text = _COMMENT.sub("", source)
    if match := re.search(r"\[[&=]?\]\s*(?:\(|\{)", text):
        line = text.count("\n", 0, match.start()) + 1
        raise MetalSimError(f"a lambda, kernel line {line}: Metal has none")
    for match in _THREADGROUP.finditer(text):
        if not _DECLARATOR.match(text, match.end()):
            continue
        before = text[: match.start()]
        if before.count("{") > before.count("}"):
            line = before.count("\n") + 1
            raise MetalSimError(
                f"a threadgroup variable inside a block, kernel line {line}: "
                "declare it in the kernel's body"
            )


def _mlx_preamble() -> str:
    """What MLX puts before every kernel, from the installed package."""
    headers = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
    return rewrite((headers / "utils.h").read_text()).replace("#pragma once", "")


def cplusplus_source(function: Function, arguments: Sequence[Parameter]) -> str:
    """A C++ file with the kernel and the entry that the executor calls."""
    check_subset(function.body)
    passed = [
        f"{'*' if p.reference == '&' else ''}({p.type}*)buffers[{i}]"
        for i, p in enumerate(arguments)
    ]
    passed += [_VALUES[a] for a in ATTRIBUTES if a in function.body]
    return (
        "#include <metal_stdlib>\n"
        f'#line 1 "mlx/utils.h"\n{_mlx_preamble()}\n'
        f'#line 1 "header"\n{rewrite(function.header)}\n'
        f'#line 1 "signature"\n{function.prototype}'
        f'#line 1 "kernel"\n{rewrite(function.body)}\n'
        '#line 1 "entry"\n'
        'extern "C" __attribute__((no_sanitize("memory"))) void metalsim_kernel_entry(\n'
        "    void* const* buffers, const metalsim::ThreadAttributes* t) {\n"
        f"  {function.name}({', '.join(passed)});\n}}\n"
    )
