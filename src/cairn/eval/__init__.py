"""How good answers are: facts found in long texts, perplexity, and what page selection keeps."""
