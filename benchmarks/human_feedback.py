"""Does a person's taste get through? SmolLM2 answers small questions; a scripted person likes short answers.

    python benchmarks/human_feedback.py

15 steps with `rewards.human()` as the only reward: a thread looks at the open questions as a person would at the rating
panel, and gives a thumb up to the shorter half of the answers that it sees, and a thumb down to the longer half. Then a
small reward model is fitted on these ratings, and 15 more steps are made with it and nobody there, from the untrained
adapter. Writes benchmarks/results/human_feedback.md and .json.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SMOLLM2 = os.environ.get("SMOLLM2", "HuggingFaceTB/SmolLM2-135M-Instruct")  # or the path of its GGUF file
STEPS = 15
QUESTIONS = [
    f"{what} {thing}?"
    for what in ("What is", "Tell me about", "Do you like", "Where do I find")
    for thing in ("an apple", "a river", "the moon", "a violin", "bread", "winter")
]


def main() -> None:
    import torch

    import grpo_kit as gk

    model = gk.load_model(SMOLLM2, load_in_4bit=False, max_seq_length=256, lora_rank=16)
    data = gk.data.from_rows([{"prompt": question} for question in QUESTIONS])
    options: dict[str, Any] = dict(
        steps=STEPS, prompts_per_step=4, num_generations=4, max_completion_length=32, learning_rate=3e-4
    )
    with tempfile.TemporaryDirectory() as folder:
        people = gk.rewards.human()
        run = gk.train(model, data, people, run_dir=Path(folder) / "people", **options)
        person = threading.Thread(target=rate, args=(run, people))
        person.start()
        run.wait()
        person.join()
        rated = run.record.steps()
        fitted = gk.rewards.fit_ratings(people.ratings)
        model.reset_adapter()
        run = gk.train(model, data, fitted, run_dir=Path(folder) / "fitted", **options)
        run.wait()
        modelled = run.record.steps()
    row = {
        "ratings": len(people.ratings),
        "thumbs_up": sum(rating.value for rating in people.ratings) / len(people.ratings),
        "length_rated": [step["length"] for step in rated],
        "reward_rated": [step["reward"] for step in rated],
        "length_fitted": [step["length"] for step in modelled],
        "reward_fitted": [step["reward"] for step in modelled],
        "fitted": repr(fitted),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "human_feedback.json").write_text(json.dumps([row], indent=1) + "\n")
    (RESULTS / "human_feedback.md").write_text(table(row))
    print(table(row))


def rate(run: Any, people: Any) -> None:
    """What a person does with the rating panel, until the run ends."""
    while run.alive:
        questions = sorted(people.open(), key=lambda question: len(question.text.strip()))
        for place, question in enumerate(questions):
            people.rate(question.id, up=2 * place < len(questions))
        time.sleep(0.05)


def table(row: dict[str, Any]) -> str:
    def ends(values: list[float]) -> str:
        return f"{sum(values[:3]) / 3:.1f} | {sum(values[-3:]) / 3:.1f}"

    return (
        f"# A person who likes short answers\n\n{row['hardware']}, {row['versions']}, {row['date']}; "
        f"SmolLM2-135M-Instruct, {STEPS} steps of 4x4 answers of at most 32 tokens to open questions, learning rate "
        f"3e-4. {row['ratings']} scripted ratings, {row['thumbs_up']:.0%} of them thumbs up (the shorter half "
        f"of each step's answers).\n\n"
        f"| reward | mean tokens, first three steps | last three steps |\n| --- | --- | --- |\n"
        f"| people, while training waits | {ends(row['length_rated'])} |\n"
        f"| a model fitted on those ratings, nobody there | {ends(row['length_fitted'])} |\n\n"
        f"The fitted model: {row['fitted']}\n"
    )


if __name__ == "__main__":
    main()
