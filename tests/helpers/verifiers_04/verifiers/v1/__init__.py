"""The shapes of `verifiers` 0.4.0 that the adapter uses: tasksets, tasks, tools, agents, traces, under the package's names.

A small package of its own that plays by the same rules: every response is asked for over HTTP, a rule to stop is tried
before each, rewards and metrics are computed from the trace, and what raises ends in the trace as an error.
"""

import copy
import inspect
from types import SimpleNamespace
from typing import Generic, TypeVar

from pydantic import BaseModel


class State(BaseModel):
    pass


class TaskConfig(BaseModel):
    pass


class TasksetConfig(BaseModel):
    id: str = ""
    task: TaskConfig = TaskConfig()


class ToolsetConfig(BaseModel):
    pass


class TaskData(BaseModel):
    idx: int = -1
    prompt: str | list[dict] | None = None
    system_prompt: str | None = None


def marked(kind: str, **more):
    "A decorator that marks a method, used with or without parameters."

    def decorator(function=None, **given):
        if function is None:
            return lambda later: decorator(later, **given)
        setattr(function, kind, {**more, **given})
        return function

    return decorator


reward, metric, stop, tool = marked("reward", weight=1.0), marked("metric"), marked("stop"), marked("tool")


def methods_of(owner, kind: str) -> dict:
    "The marked methods of an object with what they are marked with, by name."
    found = inspect.getmembers(owner, inspect.ismethod)
    return {name: (method, getattr(method, kind)) for name, method in found if hasattr(method, kind)}


DataT, StateT, ConfigT, TaskT = (TypeVar(name) for name in ("DataT", "StateT", "ConfigT", "TaskT"))


class Generics:
    def __class_getitem__(cls, parameters):
        "As `Generic`, with as many parameters as are given."
        given = parameters if isinstance(parameters, tuple) else (parameters,)
        return Generic.__class_getitem__.__func__(cls, (*given, State)[: len(cls.__parameters__)])


class Task(Generics, Generic[DataT, StateT]):
    def __init__(self, data, config=None):
        self.data, self.config = data, config

    @property
    def key(self) -> str:
        return f"key of {self.data.prompt}"

    @classmethod
    def toolsets(cls, config):
        return []

    def with_data(self, **update):
        clone = copy.copy(self)
        clone.data = self.data.model_copy(update=update)
        return clone


class Taskset(Generics, Generic[TaskT, ConfigT]):
    INFINITE = False

    def __init__(self, config):
        self.config = config

    @property
    def bounded(self) -> bool:
        return not self.INFINITE

    @classmethod
    def toolsets(cls, config):
        return []

    def __iter__(self):
        return (task.with_data(idx=idx) for idx, task in enumerate(self.load()))


class Toolset(Generics, Generic[ConfigT, StateT]):
    TOOL_PREFIX: str | None = ""

    def __init__(self, config):
        self.config, self.state = config, None

    @property
    def server_name(self) -> str:
        return type(self).__name__.lower() if self.TOOL_PREFIX == "" else self.TOOL_PREFIX or ""

    def register(self, mcp) -> None:
        for name, (method, _) in methods_of(self, "tool").items():
            mcp.add_tool(method, name=name, description=(method.__doc__ or "").strip() or None)


class Env:
    pass


class ProviderError(Exception):
    def __init__(self, message: str = "", *, status_code: int = 502):
        super().__init__(message)
        self.status_code = status_code


class Client:
    pass


class EvalClientConfig(BaseModel):
    base_url: str
    api_key_var: str


class SubprocessConfig(BaseModel):
    pass


class HarnessConfig(BaseModel):
    id: str = "null"
    tool_timeout: float = 60.0


class AgentConfig(BaseModel):
    model: str
    client: EvalClientConfig
    harness: HarnessConfig
    runtime: SubprocessConfig


class ProgramResult:
    def __init__(self, exit_code: int, stdout: str, stderr: str):
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr


class Harness:
    APPENDS_SYSTEM_PROMPT = False

    def __init__(self, config):
        self.config = config

    def resolve_prompt(self, data):
        assert self.APPENDS_SYSTEM_PROMPT
        return data.system_prompt, data.prompt


class Trace:
    "What was said in a rollout, and what came of it."

    def __init__(self, task, state):
        self.task, self.state, self.assistant_messages, self.errors = task, state, [], []
        self.rewards, self.metrics, self.stop_condition, self.is_timeout = {}, {}, None, False

    ok = property(lambda self: not self.errors)
    last_error = property(lambda self: self.errors[-1] if self.errors else None)
    num_turns = property(lambda self: len(self.assistant_messages))
    reward = property(lambda self: sum(each.value for each in self.rewards.values() if each is not None))

    @property
    def last_reply(self) -> str:
        return (self.assistant_messages[-1].content or "").strip() if self.assistant_messages else ""


def error_of(error: Exception, kind: str, where: str):
    "An error as a trace keeps it."
    return SimpleNamespace(type=kind, message=f"{where}: {type(error).__name__}: {error}")


class Agent:
    def __init__(self, config, interception):
        self.config, self.interception, self.harness = config, interception, Harness(config.harness)

    async def run(self, task, tools):
        "One rollout, and its trace."
        states = [arg for base in type(task).__orig_bases__ for arg in base.__args__ if issubclass(arg, State)]
        trace = Trace(SimpleNamespace(data=task.data), (states or [State])[0]())
        toolsets = task.toolsets(task.config)
        for toolset in toolsets:
            toolset.state = trace.state
        session = SimpleNamespace(task=task, trace=trace, client=None)
        secret, _ = self.interception.register(session)
        urls = {**tools, **self.interception.serve(toolsets)}
        data, endpoint = task.data, self.interception.endpoint
        ended = await self.harness.launch(self.config, trace, None, endpoint, secret, urls, data)
        if ended.exit_code and trace.stop_condition is None:
            trace.errors.append(error_of(RuntimeError(ended.stderr), "HarnessError", "program"))
        if trace.ok:
            await score(task, trace)
        return trace


async def score(task, trace) -> None:
    "Rewards and metrics of the task, from the trace."
    for kind, into in (("reward", trace.rewards), ("metric", trace.metrics)):
        for name, (method, told) in methods_of(task, kind).items():
            try:
                value = float(await method(trace))
            except Exception as error:
                trace.errors.append(error_of(error, "TaskError", f"{type(task).__name__} scoring"))
                return
            weight = told.get("weight", 1.0)
            into[name] = value if kind == "metric" else SimpleNamespace(score=value, weight=weight, value=weight * value)


def make_agent(config, *, interception):
    return Agent(config, interception)
