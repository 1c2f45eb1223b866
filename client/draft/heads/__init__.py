"""Draft heads that read the target's hidden rows: modules, beam search, files."""
