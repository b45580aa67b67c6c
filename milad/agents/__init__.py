"""One file per coding agent: how to point it at a server."""
