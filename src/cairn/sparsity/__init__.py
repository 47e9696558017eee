"""Page-selection policies: how a page is summarized, and which pages a query reads."""
