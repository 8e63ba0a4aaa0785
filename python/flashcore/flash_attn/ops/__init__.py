"""FlashAttention's operations beside attention, as far as models import them."""
