"""The search that all sources share: one tree, best nodes first."""
