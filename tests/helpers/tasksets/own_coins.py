"A taskset with tools over a state: pay a sum with few coins, and say done."

import verifiers.v1 as vf

__all__ = ["Coins"]


class Till(vf.State):
    coins: list[int] = []


class Counter(vf.Toolset[vf.ToolsetConfig, Till]):
    TOOL_PREFIX = None

    @vf.tool
    async def put(self, coin: int) -> str:
        "Put a coin of 1, 2 or 5 into the till."
        if coin not in (1, 2, 5):
            raise ValueError(f"no coin of {coin}")
        self.state.coins = [*self.state.coins, coin]
        return f"{len(self.state.coins)} coins"


class CoinData(vf.TaskData):
    answer: str


class CoinTask(vf.Task[CoinData, Till]):
    @classmethod
    def toolsets(cls, config):
        return [Counter(vf.ToolsetConfig())]

    @vf.reward
    async def paid(self, trace) -> float:
        return float(sum(trace.state.coins) == int(self.data.answer))

    @vf.reward
    async def few(self, trace) -> float:
        return 1.0 / (1 + len(trace.state.coins)) if sum(trace.state.coins) == int(self.data.answer) else 0.0

    @vf.stop
    async def full(self, trace: vf.Trace) -> bool:
        return sum(trace.state.coins) >= 20


class Coins(vf.Taskset[CoinTask]):
    def load(self):
        for n in (3, 7):
            yield CoinTask(CoinData(prompt=f"Pay {n}.", answer=str(n)), self.config.task)


if __name__ == "__main__":
    Counter.run()
