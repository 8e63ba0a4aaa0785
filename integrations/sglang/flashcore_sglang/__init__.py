"""FlashCore as SGLang's attention backend ``flashcore``.

SGLang calls `register` before it parses arguments and again in its workers, by the entry point ``sglang.srt.plugins``.
"""

NAME = "flashcore"


def register() -> None:
    """Makes ``--attention-backend flashcore`` known, also for decode or prefill alone; may be called any number of times."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_make)
    for offer in ("add_attention_backend_choices", "add_deterministic_attention_backend_choices"):
        getattr(server_args, offer, lambda names: None)([NAME])


def _make(runner):
    from .backend import FlashCoreBackend

    return FlashCoreBackend(runner)
