"""The HTTP side: a strict sans-IO HTTP/1.1, server-sent events, and the asyncio server."""
