"A program's way to the tools."

from verifiers.v1 import methods_of
from verifiers.v1.interception import SERVED, call_served


async def connect_mcp(config, stack, reserved=None):
    servers = {name: told["url"] for name, told in config["mcpServers"].items()}
    places = {}
    for server, url in servers.items():
        for tool in methods_of(SERVED[url], "tool"):
            places[f"{server}_{tool}" if server else tool] = (server, tool)
    tables = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in places]
    return tables, places, servers


async def call_mcp(servers, dispatch, name, arguments):
    server, tool = dispatch[name]
    return await call_served(servers[server], tool, arguments)
