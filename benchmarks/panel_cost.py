"""What the live panel costs a run: SmolLM2 on one-digit sums, every other step watched, in a real Jupyter kernel.

    python benchmarks/panel_cost.py

The kernel has no browser, so a thread asks as the page does, twice a second; messages go through the kernel's own
machinery. Counted are the panel's processor seconds (training thread and answers) and, as a check that noise permits,
the median step with and without. Writes benchmarks/results/panel_cost.md and .json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
STEPS, POLL_SECONDS = 24, 0.5


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    code = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r})['inside']()"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    texts = [output.get("text", "") for output in notebook.cells[0].outputs]
    row = json.loads("".join(texts).strip().splitlines()[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "panel_cost.json").write_text(json.dumps([row], indent=1) + "\n")
    (RESULTS / "panel_cost.md").write_text(table(row))
    print(table(row))


def table(row: dict[str, Any]) -> str:
    return (
        f"# What the live panel costs\n\n{row['hardware']}, {row['versions']}, {row['date']}; SmolLM2-135M-Instruct, "
        f"{STEPS} steps of 4x4 completions, every other step watched.\n\n"
        "| | with the panel | without |\n| --- | --- | --- |\n"
        f"| median seconds a step | {row['watched']:.2f} | {row['alone']:.2f} |\n"
        f"| the panel's processor seconds a step | {row['panel_seconds']:.4f} | 0 |\n\n"
        f"The panel's processor time is {row['share']:.3%} of the watched steps' time.\n"
    )


def inside() -> None:
    """In the kernel: train and watch, print one JSON row."""
    import torch

    import grpo_kit as gk
    from grpo_kit.widgets import Panel

    class Metered(Panel):
        """Counts its processor seconds, on whichever thread they are spent."""

        spent = 0.0
        watched = False

        def _on_change(self) -> None:
            if self.watched:
                self._metered(super()._on_change)

        def _receive(self, *message: Any) -> None:
            self._metered(super()._receive, *message)

        def _metered(self, work: Any, *arguments: Any) -> None:
            before = time.thread_time()
            work(*arguments)
            self.spent += time.thread_time() - before

    def right_answer(completion: str, answer: int) -> float:
        return float(gk.rewards.last_number(completion) == answer)

    model = gk.load_model(load_in_4bit=False, max_seq_length=512, lora_rank=16)
    data = gk.data.arithmetic(400)
    run = gk.train(
        model, data, right_answer, steps=STEPS, num_generations=4, max_completion_length=12, learning_rate=3e-4
    )
    panel = Metered(run)

    def page() -> None:
        while run.alive:
            panel.watched = run.step % 2 == 1  # the step being made is even
            if panel.watched:
                step = run.step
                asked = {"type": "poll", "since": step, "events_since": 0, "completions_step": step, "epoch": 0}
                panel._receive(None, asked, [])
            time.sleep(POLL_SECONDS)

    asking = threading.Thread(target=page)
    asking.start()
    run.wait()
    asking.join()
    seconds = run.metrics["seconds"].tolist()
    watched, alone = seconds[1::2], seconds[0::2]
    row = {
        "watched": statistics.median(watched),
        "alone": statistics.median(alone),
        "panel_seconds": panel.spent / len(watched),
        "share": panel.spent / sum(watched),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    print()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
