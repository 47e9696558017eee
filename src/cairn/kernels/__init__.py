"""Triton kernels, each next to its torch reference. Imported only where triton is installed."""
