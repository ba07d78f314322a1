"""One step, the background run around it, its checkpoints, and evaluation. Start reading at `step`."""

from grpo_kit.training.derive import Setting
from grpo_kit.training.evaluate import Evaluation, evaluate
from grpo_kit.training.options import TrainOptions
from grpo_kit.training.run import Run, RunFailed
from grpo_kit.training.start import resume, train

__all__ = ["Evaluation", "Run", "RunFailed", "Setting", "TrainOptions", "evaluate", "resume", "train"]
