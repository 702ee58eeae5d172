"""Loads tokenizers as mlx-lm does and prints what came: one JSON list for all of them.

Argument: a JSON list of [folder, trust]; trust is true, false or null for unset.
"""

import json
import sys
from pathlib import Path

from mlx_lm.utils import load_tokenizer


def outcome(folder: str, trust: bool | None) -> dict[str, object]:
    extra = {} if trust is None else {"trust_remote_code": trust}
    try:
        tokenizer = load_tokenizer(folder, extra)
    except Exception as error:
        text = str(error).strip().splitlines()[0].replace(folder, "FOLDER")
        return {"error": type(error).__name__, "text": text}
    kind = type(tokenizer._tokenizer)
    return {
        "module": kind.__module__.partition(".")[0],
        "class": kind.__name__,
        "ends": sorted(tokenizer.eos_token_ids),
        "controls": tokenizer.all_special_ids[-256:],
        "size": len(tokenizer),
    }


cases = json.loads(sys.argv[1])
results = [outcome(folder, trust) for folder, trust in cases]
Path(sys.argv[2]).write_text(json.dumps(results))
