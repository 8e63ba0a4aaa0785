"""FlashCore as vLLM's attention backend ``CUSTOM``.

vLLM calls `register` in every process, by the entry point ``vllm.general_plugins``; ``--attention-backend CUSTOM`` then uses
`flashcore_vllm.backend.FlashCoreBackend`.
"""


def register() -> None:
    """Tells vLLM where the backend is; may be called any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "flashcore_vllm.backend.FlashCoreBackend")
