"""What the patched trainers of other libraries share (`logix.huggingface`, `logix.lightning`)."""
