"A taskset with tools that keep nothing: what a basket costs. The system prompt says how to ask."

import verifiers.v1 as vf

__all__ = ["Shop"]
STOCK = {"apple": 3, "pear": 5, "plum": 11}


class Prices(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def price(self, item: str, count: int = 1) -> int:
        "What so many of an item cost."
        if item not in STOCK:
            raise KeyError(f"no {item} here")
        return STOCK[item] * count


class ShopData(vf.TaskData):
    answer: str
    item: str


class ShopTask(vf.Task[ShopData]):
    @classmethod
    def toolsets(cls, config):
        return [Prices(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=-0.05)
    async def asked(self, trace) -> float:
        return float(sum(len(message.tool_calls or []) for message in trace.assistant_messages))

    @vf.stop
    async def long(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4


class Shop(vf.Taskset[ShopTask]):
    def load(self):
        for n, item in enumerate(STOCK):
            yield ShopTask(
                ShopData(
                    prompt=f"{n + 1} x {item}",
                    system_prompt="Call price.",
                    answer=str((n + 1) * STOCK[item]),
                    item=item,
                ),
                self.config.task,
            )


if __name__ == "__main__":
    Prices.run()
