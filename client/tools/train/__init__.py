"""`client train-draft`: draft models and heads for a target."""
