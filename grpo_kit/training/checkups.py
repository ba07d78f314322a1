"""What a run looks at from time to time, so that its learning can be judged: held-out prompts, and one question that
is answered again and again (the canary)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_kit.model import Model
from grpo_kit.model.chat import Prompt
from grpo_kit.rewards import RewardSet, ScoreTable
from grpo_kit.rollout import Sampling, stream_seed
from grpo_kit.store import Record
from grpo_kit.training.evaluate import Evaluation, answer_all, score_answers, without_people
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.prompts import Prompts

Report = Callable[[ScoreTable], None]


@dataclass(frozen=True)
class Checkups:
    """held_out: None for a run without evaluation; canary: None for one without.

    What was found becomes events of the record: "evaluation", with accuracy (of the greedy answers), pass_at_k (at
    least one of k sampled answers passes) and the rewards' means in its data, and "canary", with prompt and answer. The
    events' steps count from 0, before training.
    """

    model: Model
    held_out: Prompts | None
    canary: Prompt | None
    options: TrainOptions
    record: Record

    def due(self, step: int) -> list[str]:
        """The kinds of events that step `step` lacks, although it is one with a checkup. At the beginning and the end
        there always is one."""
        every = self.options.eval_steps
        if every is None or not (step % every == 0 or step == self.options.steps):
            return []
        wanted = {"evaluation": self.held_out is not None, "canary": self.canary is not None}
        made = {event["kind"] for event in self.record.events() if event["step"] == step}
        return [kind for kind, wants in wanted.items() if wants and kind not in made]

    def check_up(self, step: int, rewards: RewardSet, pause_point: Callable[[], None], report: Report) -> None:
        """Answer, score and write what is due; `report` is told of the scores first. The caller holds the model's lock;
        whatever `pause_point` raises leaves nothing half written."""
        for kind in self.due(step):
            if kind == "evaluation":
                assert self.held_out is not None
                text, data = self._evaluate(step, self.held_out, rewards, pause_point, report)
            else:
                assert self.canary is not None
                text, data = self._ask_canary(self.canary, pause_point)
            self.record.add_event(kind, text, step, data)

    def _evaluate(
        self,
        step: int,
        prompts: Prompts,
        rewards: RewardSet,
        pause_point: Callable[[], None],
        report: Report,
    ) -> tuple[str, dict[str, Any]]:
        length, k = self.options.max_completion_length, self.options.num_generations_eval or 0
        greedy = answer_all(self.model, prompts, Sampling(length, temperature=0), between_tokens=pause_point)
        answers = self._scored(prompts, rewards, greedy, step)
        report(answers.table)
        passed = self._passed(answers)
        data: dict[str, Any] = {
            "accuracy": sum(passed) / len(passed),
            "answers": len(passed),
            "reward": answers.mean,
            **{f"rewards/{name}": mean for name, mean in answers.means.items()},
        }
        text = f"held-out: {100 * data['accuracy']:.0f} % right"
        if k:
            # The same draws each time, so that two evaluations differ by the model and not by luck.
            sampling = self.options.sampling(stream_seed(self.options.seed, "evaluation"))
            drawn = answer_all(self.model, prompts, sampling, k, between_tokens=pause_point)
            tries = self._scored(prompts, rewards, drawn, step)
            report(tries.table)
            hits = self._passed(tries)
            groups = [any(hits[start : start + k]) for start in range(0, len(hits), k)]
            data |= {"pass_at_k": sum(groups) / len(groups), "k": k}
            text += f", {100 * data['pass_at_k']:.0f} % within {k} tries"
        return text, data

    def _scored(self, prompts: Prompts, rewards: RewardSet, completions: list[Any], step: int) -> Evaluation:
        with self.model.lock.released():
            return score_answers(without_people(rewards), prompts, completions, step)

    def _passed(self, answers: Evaluation) -> list[bool]:
        """By the first reward."""
        assert self.options.pass_threshold is not None
        firsts = [row[0].value for row in answers.table.scores]
        return [value is not None and value >= self.options.pass_threshold for value in firsts]

    def _ask_canary(self, prompt: Prompt, pause_point: Callable[[], None]) -> tuple[str, dict[str, Any]]:
        sampling = Sampling(self.options.max_completion_length, temperature=0)
        answer = self.model.complete([self.model.encode(prompt)], sampling, between_tokens=pause_point)[0][0].text
        return answer, {"prompt": self.model.render(prompt), "answer": answer}
