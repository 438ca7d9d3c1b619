"""Runs recipes of the package tinker-cookbook as they are installed: python cookbook_recipe.py URL FOLDER RECIPE ...
Each logs into FOLDER/RECIPE.

Three things are replaced, by the package's own means or from outside, because they would need the Hugging Face Hub:
the data set (`datasets.load_dataset` gives rows made here), the tokenizer (registered with `register_tokenizer`:
one token of the embedded policy for each word, and a response is read as the parity of its first token), and,
where a recipe asks for it, the loss `stable_reinforce` (its field `loss_fn` is set to `importance_sampling`).
The recipes' files are not touched.
"""

import sys
from importlib import import_module

import datasets
from tinker_cookbook import tokenizer_utils

MODEL = "Qwen/Qwen3-8B-Base"  # the cookbook knows its renderer; the service serves its own policy under this name
WORDS = 12  # tokens that words become


class WordTokenizer:
    "One token for each word; the embedded policy's ids 3 to 14 stand for all words."

    bos_token = None
    eos_token_id = 1
    name_or_path = MODEL

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [3 + sum(word.encode()) % WORDS for word in text.split()]

    def decode(self, tokens, **_) -> str:
        tokens = [int(token) for token in tokens]
        return f"\\boxed{{{tokens[0] % 2}}}" if tokens else ""


def made_rows(count: int = 32) -> datasets.DatasetDict:
    "Rows with the columns of both recipes' data sets."
    talk = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three of them."}]
    rows = {
        "question": [f"How many are {number} and one?" for number in range(count)],
        "answer": ["They are one. #### 1"] * count,
        "messages": [talk] * count,
    }
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(rows))


def run_recipe(recipe: str, url: str, folder: str) -> None:
    """Two steps of a recipe. Of sixteen tasks a step, some always have right and wrong answers,
    so that there is a gradient."""
    tokenizer_utils.register_tokenizer(MODEL, WordTokenizer)
    datasets.load_dataset = lambda *names, **options: made_rows()
    module = import_module(f"tinker_cookbook.recipes.{recipe}")
    fields = dict(base_url=url, log_path=folder, model_name=MODEL, batch_size=16, lora_rank=4, max_steps=2)
    if recipe == "rl_loop":
        fields |= dict(group_size=8, max_tokens=16, loss_fn="importance_sampling", learning_rate=1e-3)
    module.main(module.Config(**fields))


if __name__ == "__main__":
    url, folder, *recipes = sys.argv[1:]
    for each in recipes:
        run_recipe(each, url, f"{folder}/{each}")
