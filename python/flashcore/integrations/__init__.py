"""FlashCore inside other libraries; each module is imported by who wants it."""
