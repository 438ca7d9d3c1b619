"The server between the program that plays and the client that answers."

import asyncio
import json
import secrets
from types import SimpleNamespace

from aiohttp import web

from verifiers.v1 import ProviderError, methods_of

SERVED = {}  # toolsets by their address


class Dialect:
    def validate_response(self, raw):
        assert raw["object"] == "chat.completion"
        return raw

    def parse_response(self, raw):
        message = raw["choices"][0]["message"]
        return SimpleNamespace(content=message.get("content"), tool_calls=message.get("tool_calls"))


class InterceptionServer:
    async def __aenter__(self):
        self.sessions = {}
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.endpoint = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()

    def register(self, session):
        model, state = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.sessions[model] = session
        return model, state

    def serve(self, toolsets):
        "Addresses by name of server."
        urls = {toolset.server_name: f"{self.endpoint}/tools/{id(toolset)}" for toolset in toolsets}
        SERVED.update({urls[toolset.server_name]: toolset for toolset in toolsets})
        return urls

    async def answer(self, request):
        session, body = self.sessions[request.headers["Authorization"].removeprefix("Bearer ")], await request.json()
        for name, (stops, _) in methods_of(session.task, "stop").items():
            if await stops(session.trace):
                session.trace.stop_condition = name
                return web.json_response({"error": f"rollout stopped: {name}"}, status=400)
        try:
            response = await session.client.get_response(Dialect(), body, None)
        except ProviderError as error:
            return web.json_response({"error": str(error)}, status=error.status_code)
        session.trace.assistant_messages.append(response)
        return web.json_response(response.raw)


async def call_served(url: str, name: str, arguments: dict) -> str:
    "What a tool says, or that it failed."
    await asyncio.sleep(0)
    try:
        found = await methods_of(SERVED[url], "tool")[name][0](**arguments)
    except Exception as error:
        return f"Error executing tool {name}: {error}"
    return found if isinstance(found, str) else json.dumps(found)
