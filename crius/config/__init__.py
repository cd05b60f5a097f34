"""The run, as data: typed sections, TOML and flags, provenance, and the rules between sections. No torch here."""
