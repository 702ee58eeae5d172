"""Tables that benchmarks keep on pages, between ``<!-- x -->`` and ``<!-- /x -->``."""


def with_table(page: str, name: str, table: str) -> str:
    """``page`` with ``table`` between the markers called ``name``, which it must have."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"
