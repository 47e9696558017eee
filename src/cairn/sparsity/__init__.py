"""Page-selection policies: what a page is summed up by, and which pages a query reads."""
