"""Another health service, seen over HTTP."""
