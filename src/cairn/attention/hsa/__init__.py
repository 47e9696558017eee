"""Hierarchical sparse attention: a window, the best pages outside it, and one merge of both."""
