"""The attacks, one module per kind; `benchmarks.redteam.listing` collects them."""
