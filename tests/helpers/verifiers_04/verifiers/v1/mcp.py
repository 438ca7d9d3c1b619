"Servers of tools that all tasks share."

from contextlib import asynccontextmanager


@asynccontextmanager
async def serve_shared(toolsets, harness_is_local=True):
    assert not toolsets
    yield {}
