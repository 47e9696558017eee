"""Models that SGLang does not have. It takes the `EntryClass` of every module here."""
