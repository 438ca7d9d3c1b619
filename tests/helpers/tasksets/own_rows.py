"Tasksets that are refused, one whose reward raises, and one whose rows repeat."

import verifiers.v1 as vf


class RowData(vf.TaskData):
    answer: str = ""


class RowTask(vf.Task[RowData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class BrokenTask(vf.Task[RowData]):
    @vf.reward
    async def right(self, trace) -> float:
        raise RuntimeError("no scale here")


class Repeated(vf.Taskset[RowTask]):
    "Forty sums, each written in three ways, and one riddle with two answers."

    def load(self):
        asked = [(f"{n}+{n}={blanks}", str(2 * n)) for n in range(40) for blanks in ("", " ", "  ")]
        for prompt, answer in [*asked, ("A word?", "sun"), ("A word?", "moon")]:
            yield RowTask(RowData(prompt=prompt, answer=answer), self.config.task)


class Broken(vf.Taskset[BrokenTask]):
    def load(self):
        yield BrokenTask(RowData(prompt="1+1="), self.config.task)


class Endless(vf.Taskset[RowTask]):
    INFINITE = True

    def load(self):
        yield RowTask(RowData(prompt="1+1="), self.config.task)


class Opened(vf.Taskset[RowTask]):
    def load(self):
        yield RowTask(RowData(), self.config.task)
