"""Online DPO: of two answers just sampled, the better one is made likelier than the worse one, relative to the
reference. With its sibling IPO, which aims at a margin instead of growing it without end."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_kit.algorithms.registry import Algorithm, register
from grpo_kit.algorithms.weights import answer_sum


def sigmoid_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """−log σ(β·(chosen − rejected)) for each pair, [P].

    chosen, rejected [P]: Σ_t (logprob − reference logprob) of the two answers. DPO, https://arxiv.org/abs/2305.18290,
    equation 7.
    """
    return -logsigmoid(beta * (chosen - rejected))


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """((chosen − rejected) − 1/(2β))² for each pair, [P]; see `sigmoid_loss`. IPO, https://arxiv.org/abs/2310.12036,
    equation 17."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def rank_pairs(rewards: Tensor, num_generations: int) -> tuple[list[tuple[int, int]], int]:
    """Pairs `(better, worse)` of each group, and how many were ties.

    rewards [N] ordered by group, NaN where unscored (left out). A group is ranked and its best paired with its worst,
    the second best with the second worst, and so on; with two answers that is the pair. A pair scored alike says
    nothing: it is skipped and counted. Raises ValueError if N is not a multiple of `num_generations`.
    """
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards can't be split into groups of {num_generations}")
    values = rewards.tolist()
    pairs, ties = [], 0
    for start in range(0, len(values), num_generations):
        scored = [i for i in range(start, start + num_generations) if values[i] == values[i]]
        ranked = sorted(scored, key=lambda i: (-values[i], i))
        for place in range(len(ranked) // 2):
            better, worse = ranked[place], ranked[-1 - place]
            if values[better] - values[worse] < 1e-6:
                ties += 1
            else:
                pairs.append((better, worse))
    return pairs, ties


register(
    Algorithm(
        name="online_dpo",
        summary="Best against worst of each group, by DPO's logistic loss; ties skipped.",
        formula=r"L = -\frac{1}{P} \sum_{(c, r)} \log \sigma\left( \beta \left[ \log \frac{\pi_\theta(c)}"
        r"{\pi_{\mathrm{ref}}(c)} - \log \frac{\pi_\theta(r)}{\pi_{\mathrm{ref}}(r)} \right] \right)",
        source="Online DPO, https://arxiv.org/abs/2402.04792; DPO, https://arxiv.org/abs/2305.18290, equation 7",
        when="Preferences rather than scores: a judge or a person who says which of two answers is better. It can make "
        "both answers less likely as long as the worse one falls faster.",
        loss=sigmoid_loss,
        weights=answer_sum,
        advantages="pairs",
        defaults={"beta": 0.1},
    )
)
register(
    Algorithm(
        name="online_ipo",
        summary="Best against worst of each group, by IPO's squared loss; ties skipped.",
        formula=r"L = \frac{1}{P} \sum_{(c, r)} \left( \log \frac{\pi_\theta(c)}{\pi_{\mathrm{ref}}(c)} - \log "
        r"\frac{\pi_\theta(r)}{\pi_{\mathrm{ref}}(r)} - \frac{1}{2\beta} \right)^2",
        source="IPO, https://arxiv.org/abs/2310.12036, equation 17, on pairs sampled online",
        when="As online_dpo, when preferences are so clear that DPO's margin grows without end.",
        loss=ipo_loss,
        weights=answer_sum,
        advantages="pairs",
        defaults={"beta": 0.1},
    )
)
