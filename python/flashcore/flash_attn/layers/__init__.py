"""What models import of FlashAttention beside attention."""
