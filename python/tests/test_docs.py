"""Every Python example of docs/python.md runs as printed, one after another."""

import importlib.util
import re
import sys
from pathlib import Path

from harness import Skip

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_examples_of_the_guide_run():
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise Skip(f"{name} is not installed")
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(examples) >= 10
    before, space = dict(sys.modules), {}
    try:
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), space)
    finally:  # the guide puts FlashCore in FlashAttention's place
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn_interface"):
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]
