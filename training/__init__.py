"""Trains small HiLS models, and their full-attention twins, on text with facts hidden in it."""
