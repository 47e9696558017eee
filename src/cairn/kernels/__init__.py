"""Triton kernels, each with its torch reference beside it. Imported only where triton is there."""
