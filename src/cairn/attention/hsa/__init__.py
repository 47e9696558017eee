"""Hierarchical sparse attention: attend to a window and to the best pages outside it, and merge."""
