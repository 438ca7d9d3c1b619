"A taskset of one turn: a sum, in digits alone. Half of the reward is for a number at all."

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(trace.last_reply.rpartition(":")[2].strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def number(self, trace) -> float:
        return float(trace.last_reply.rpartition(":")[2].strip().isdigit())

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    rows: int = 3


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a in range(10, 10 + self.config.rows):
            yield SumTask(SumData(prompt=f"{a}+{2 * a + 1}=", answer=str(3 * a + 1)), self.config.task)
