"""Errors in the words of the function that was called: what it calls its arguments, not what FlashCore's core calls them.

Public functions catch an error, have it retold, and raise it again; a call without a mistake costs nothing.
"""

from __future__ import annotations

import re

TOLD = (TypeError, ValueError, NotImplementedError, BufferError)
"""What says that an argument is wrong; other errors name none."""
TENSOR = r"(?<!pass )(?<!pass k and )\b{}\b"
"""A tensor of one letter in a message; "pass k and v" is in the caller's words already."""
PATTERNS = {
    "queries": [(r"\boffset (\d+) of q\b", r"{}[\1]"), (r"\bquery[ _](?:lengths|offsets)\b", "{}"), (r"\b(\d+) used lengths for q\b", r"{} has \1 numbers")],
    "keys": [(r"\boffset (\d+) of k\b", r"{}[\1]"), (r"\bkey[ _](?:lengths|offsets)\b", "{}"), (r"\b(\d+) used lengths for k\b", r"{} has \1 numbers")],
    "rows": [(r"\brows of k\b", "rows of {}")],
    "table": [(r"\b(?:the |a )?page[ _]table\b|\bthe table\b", "{}")],
    "q": [(TENSOR.format("q"), "{}")],
    "k": [(TENSOR.format("k"), "{}")],
    "v": [(TENSOR.format("v"), "{}")],
    "k_cache": [(r"\bk_cache\b", "{}")],
    "v_cache": [(r"\bv_cache\b", "{}")],
    "scale": [(r"\bscale\b", "{}")],
    "slopes": [(r"\bslopes\b", "{}")],
    "sinks": [(r"\bsinks\b", "{}")],
    "mask": [(r"\bthe (?:bias|mask)\b|\bkey_mask\b|\ba mask\b", "{}")],
    "rotary": [(r"\bcosines and sines\b|^rotary(?= has | is )", "{}")],
    "slots": [(r"\bslots\b", "{}")],
    "lses": [(r"\bthe lse of a part\b|\blse\b", "{}")],
    "ids": [(r"\bexpert ids\b", "{}")],
    "weights": [(r"\brouting weights\b", "{}")],
    "logits": [(r"\brouter logits\b", "{}")],
    "bias": [(r"\bthe router's bias\b", "{}")],
    "shared": [(r"\bthe shared expert(?:'s)?\b", "{}")],
    "experts": [(r"\bthe experts' matrices\b", "{}")],
    "offsets": [(r"\boffsets\b", "{}")],
    "dropout": [(r"(?<!the )\bdropout\b", "{}")],
    "seed": [(r"\bthe seed\b", "{}")],
    "factors": [(r"(?<=tensors have no )factors\b", "{}")],
}
"""What the core and the extension say, by what it is."""


def retell(error: Exception, **words: str | None) -> None:
    """Puts the caller's words into an error's message; what has no word stays as it is."""
    if not isinstance(error, TOLD) or not error.args or not isinstance(error.args[0], str):
        return
    text = error.args[0]
    for what, patterns in PATTERNS.items():
        word = words.get(what)
        for pattern, instead in patterns if word else ():
            text = re.sub(pattern, instead.format(word), text)
    error.args = (text, *error.args[1:])
