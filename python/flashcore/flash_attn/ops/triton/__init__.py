"""Those that FlashAttention writes in Triton."""
