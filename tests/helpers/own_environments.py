"""Three environments written against the public classes of the package `verifiers` and nothing else:
one turn, tools, and tools over a state."""

import verifiers as vf
from datasets import Dataset


def sums(rows: int = 24, first: int = 10) -> vf.Environment:
    "One turn: a sum, in digits alone. Half of the reward is for a number at all."
    parser = vf.Parser(extract_fn=lambda text: text.rpartition(":")[2].strip())

    async def right(parser, completion, answer) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    def number(parser, completion) -> float:
        return float((parser.parse_answer(completion) or "").isdigit())

    def length(completion) -> float:
        return float(len(completion[-1].content or "")) if completion else 0.0

    rubric = vf.Rubric(funcs=[right, number], weights=[0.5, 0.5], parser=parser)
    rubric.add_metric(length)
    table = [{"question": f"{a}+{2 * a + 1}=", "answer": str(3 * a + 1)} for a in range(first, first + rows)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(table), rubric=rubric, parser=parser, pass_threshold=0.75)


STOCK = {"apple": 3, "pear": 5, "plum": 11}


def price(item: str, count: int = 1) -> int:
    "What so many of an item cost."
    if item not in STOCK:
        raise KeyError(f"no {item} here")
    return STOCK[item] * count


async def total(numbers: list[int]) -> int:
    "The sum of numbers."
    return sum(numbers)


def shop(rows: int = 12, max_turns: int = 4) -> vf.Environment:
    "Tools without a state: what a basket costs. The system prompt says how to ask."

    def right(completion, answer) -> float:
        return float(
            bool(completion) and completion[-1].role == "assistant" and (completion[-1].content or "").strip() == answer
        )

    async def asked(state) -> float:
        return float(sum(len(step["completion"][-1].tool_calls or []) for step in state["trajectory"]))

    items = list(STOCK)
    table = [
        {
            "question": f"{n + 1} x {items[n % 3]}",
            "answer": str((n + 1) * STOCK[items[n % 3]]),
            "info": {"item": items[n % 3]},
        }
        for n in range(rows)
    ]
    rubric = vf.Rubric(funcs=[right, asked], weights=[1.0, -0.05])
    return vf.ToolEnv(
        tools=[price, total],
        max_turns=max_turns,
        system_prompt="Call price.",
        dataset=Dataset.from_list(table[4:]),
        eval_dataset=Dataset.from_list(table[:4]),
        rubric=rubric,
    )


class Till(vf.StatefulToolEnv):
    "Coins go into a till that belongs to the rollout; the policy does not see which."

    def __init__(self, **more):
        super().__init__(**more)
        self.add_tool(self.put, args_to_skip=["till"])
        self.add_tool(self.look, args_to_skip=["till"])
        self.cleaned = 0

    async def setup_state(self, state, **more):
        state["till"] = []
        return await super().setup_state(state, **more) or state

    def update_tool_args(self, tool_name, tool_args, messages, state, **more):
        return {**tool_args, "till": state["till"]}

    async def put(self, coin: int, till: list) -> str:
        "Put a coin of 1, 2 or 5 into the till."
        if coin not in (1, 2, 5):
            raise ValueError(f"no coin of {coin}")
        till.append(coin)
        return f"{len(till)} coins"

    async def look(self, till: list) -> str:
        "The coins in the till."
        return " ".join(map(str, till)) or "empty"

    @vf.stop
    async def is_full(self, state) -> bool:
        return sum(state["till"]) >= 20

    @vf.cleanup
    async def emptied(self, state):
        self.cleaned += 1


def coins(rows: int = 12) -> vf.Environment:
    "Tools over a state: pay a sum with few coins, and say done."

    def paid(state, answer) -> float:
        return float(sum(state["till"]) == int(answer))

    def few(state, answer) -> float:
        return 1.0 / (1 + len(state["till"])) if sum(state["till"]) == int(answer) else 0.0

    table = [{"question": f"Pay {n}.", "answer": str(n)} for n in range(1, 1 + rows)]
    return Till(
        max_turns=5, dataset=Dataset.from_list(table), rubric=vf.Rubric(funcs=[paid, few]), stop_errors=[RecursionError]
    )


def second_try(rows: int = 64) -> vf.Environment:
    "A sum, and after a wrong answer the sum once more; in digits alone, so that the embedded policy can play."

    class SecondTry(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **more):
            if messages[-1].content.endswith(":" + state["answer"]):
                state["final_env_response"] = []
            return [vf.UserMessage(content=state["prompt"][0].content)]

    def right(completion, answer) -> float:
        return float(bool(completion) and completion[-1].content.endswith(":" + answer))

    table = [{"question": f"{a}+{2 * a + 1}=", "answer": str(3 * a + 1)} for a in range(10, 10 + rows)]
    return SecondTry(dataset=Dataset.from_list(table), rubric=vf.Rubric(funcs=[right]), max_turns=2)
