"""Plays scripts against a taskset and prints what came of each, as JSON.

Run by `test_tasksets.py` with a package in front."""

import asyncio
import json
import sys
import warnings

from rlbench.base.chat import read_chat
from rlbench.environments import verifiers_adapter as foreign
from rlbench.environments.episode import Done
from rlbench.environments.tasks import check_tasks
from rlbench.environments.verifiers_tasks import verifiers_tasks


async def play(tasks, task, lines: list[str]) -> dict:
    "The rollout of a script: its last line is followed by the run's limit."
    episode, heard, shown = foreign.VerifiersEpisode(tasks), None, []
    episode.start(task)
    for line in lines:
        heard = await episode.advance(line)
        if isinstance(heard, Done):
            break
        shown += [[message["role"], message["content"]] for message in read_chat(heard.text).messages]
    done = heard if isinstance(heard, Done) else await episode.cut()
    judged = done.judged
    outcome = {"reward": judged.reward, "parts": dict(judged.parts), "outcome": judged.outcome.value, "shown": shown}
    return {**outcome, "text": done.text, "message": judged.message}


def main() -> None:
    asked = json.loads(sys.argv[1])
    found = {"played": [], "refused": [], "drawn": {}}
    for id, place, lines in asked["play"]:
        tasks = foreign.load_environment(id, "{}")
        found["played"].append(asyncio.run(play(tasks, tasks.task(id, place), lines)))
    for id in asked["refuse"]:
        try:
            foreign.load_environment(id, "{}")
        except ValueError as error:
            found["refused"].append(str(error))
    try:
        foreign.to_verifiers([])
    except ValueError as error:
        found["export"] = str(error)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for split in ("train", "held_out"):
            drawn = check_tasks("verifiers", verifiers_tasks(split=split, id=asked["draw"], one_in=2))
            found["drawn"][split] = [[task.prompt, json.loads(task.answer)["answer"]] for task in drawn]
    found["said"] = sorted({str(each.message) for each in told if "tasks.verifiers" in str(each.message)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
