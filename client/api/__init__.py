"""The HTTP API of `client api`: dialects that existing clients speak, over the client library."""
