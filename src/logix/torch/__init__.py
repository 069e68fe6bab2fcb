"""logix for PyTorch: records by hooks."""
