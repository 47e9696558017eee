"""Triton kernels, and one in CUDA C++. Imported only where triton is installed."""
