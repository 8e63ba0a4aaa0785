"""FlashCore as vLLM's attention backend ``CUSTOM``, and for latent attention as ``FLASHCORE_MLA``.

vLLM calls `register` in every process, by the entry point ``vllm.general_plugins``; ``--attention-backend CUSTOM`` then uses
`flashcore_vllm.backend.FlashCoreBackend`, and ``--attention-backend FLASHCORE_MLA``, for models like DeepSeek's,
`flashcore_vllm.latent.FlashCoreMLABackend`. Their prompts go to `flashcore_vllm.prompts.FlashCoreMLAPrefillBackend` with
``-ac '{"mla_prefill_backend": "CUSTOM"}'``.
"""

LATENT = "FLASHCORE_MLA"


def register() -> None:
    """Tells vLLM where the backends are; may be called any number of times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "flashcore_vllm.backend.FlashCoreBackend")
    # Older releases have no backends with names of their own.
    if hasattr(AttentionBackendEnum, "register") and LATENT not in AttentionBackendEnum.__members__:
        register_backend(LATENT, "flashcore_vllm.latent.FlashCoreMLABackend")
    try:
        from vllm.v1.attention.backends.mla.prefill import registry
    except ImportError:  # where they have no such place
        return
    place = registry.MLAPrefillBackendEnum.CUSTOM
    registry.register_mla_prefill_backend(place, "flashcore_vllm.prompts.FlashCoreMLAPrefillBackend")
