"""Quality of answers: facts found in long texts, perplexity, and what page selection keeps."""
