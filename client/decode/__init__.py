"""The decode loop: draft, verify, accept. Source: SpecExec (arXiv 2406.02532), section 4."""
