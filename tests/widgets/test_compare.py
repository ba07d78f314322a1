from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from grpo_kit.store import Record
from grpo_kit.widgets import compare
from grpo_kit.widgets.compare import COLORS, trailing_mean
from tests.widgets.fake_run import FakeRun

Make = Callable[..., FakeRun]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make("grpo", name="a", seed=1, …)`: a fake run of six steps in a folder of that name."""

    def made(algorithm: str, name: str, seed: int = 0, rate: float = 1e-5, **options: Any) -> FakeRun:
        run = FakeRun(tmp_path / name, **{"ready": 6, "edit_step": 0, **options})
        run.name = name
        run.record.write_run({"options": {"algorithm": algorithm, "seed": seed, "learning_rate": rate}, "model": {}})
        return run

    return made


def bold(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.opacity is None and trace.xaxis == "x"]


def legend(figure: Any) -> list[str]:
    return [trace.name for trace in figure.data if trace.showlegend]


def test_every_run_has_a_thin_line_and_a_smoothed_one_of_its_color(make: Make) -> None:
    runs = [make("grpo", "a"), make("rloo", "b")]
    figure = compare(*runs, smooth=2)
    thin = [trace for trace in figure.data if trace.opacity is not None]
    for run, raw, mean in zip(runs, thin, bold(figure), strict=True):
        values = [row["reward"] for row in run.record.steps()]
        assert list(raw.x) == list(mean.x) == [1, 2, 3, 4, 5, 6]
        assert list(raw.y) == values
        assert mean.y[0] == values[0]
        assert mean.y[5] == pytest.approx((values[4] + values[5]) / 2)
        assert raw.line.color == mean.line.color
    assert [trace.line.color for trace in bold(figure)] == list(COLORS[:2])
    assert legend(figure) == ["grpo", "rloo"]


def test_trailing_mean() -> None:
    assert trailing_mean([1.0, 3.0, None, 8.0], 2) == [1.0, 2.0, None, 8.0]
    assert trailing_mean([1.0, 2.0, 6.0], 3) == [1.0, 1.5, 3.0]
    assert trailing_mean([1.0, 2.0], 1) == [1.0, 2.0]


def test_runs_folders_and_records_are_all_runs(make: Make) -> None:
    runs = [make(algorithm, algorithm) for algorithm in ("grpo", "rloo", "dapo", "bnpo")]
    for run in runs[1:]:
        run.record.close()
    given = [runs[0], runs[1].directory, str(runs[2].directory), Record(runs[3].directory / "run.sqlite")]
    figure = compare(*given, metric="rewards/right_answer")
    assert legend(figure) == ["grpo", "rloo", "dapo", "bnpo"]
    for run, trace in zip(runs, bold(figure), strict=True):
        assert list(trace.customdata) == [row["rewards/right_answer"] for row in run.record.steps()]


def test_seeds_of_one_algorithm_share_color_and_legend(make: Make) -> None:
    figure = compare(*[make(name, f"{name}-{seed}", seed) for name in ("grpo", "rloo") for seed in (1, 2, 3)])
    assert legend(figure) == ["grpo", "rloo"]
    assert [trace.line.color for trace in bold(figure)] == [COLORS[0]] * 3 + [COLORS[1]] * 3
    assert bold(figure)[1].hovertemplate.startswith("grpo, grpo-2 ")


def test_algorithms_that_do_not_tell_runs_apart_give_way_to_names(make: Make) -> None:
    assert legend(compare(make("grpo", "a"), make("grpo", "b", seed=1))) == ["a", "b"]
    different = [make("grpo", "c", rate=1e-6), make("grpo", "d", rate=1e-5), make("rloo", "e")]
    assert legend(compare(*different)) == ["c", "d", "e"]


def test_labels_may_be_given(make: Make) -> None:
    figure = compare({"small <b>steps</b>": make("grpo", "a"), "large": make("rloo", "b").directory})
    assert legend(figure) == ["small &lt;b&gt;steps&lt;/b&gt;", "large"]


def test_held_out_accuracy_stands_beside_it(make: Make) -> None:
    evaluated, not_evaluated = make("grpo", "a", evaluate_every=3), make("rloo", "b")
    figure = compare(evaluated, not_evaluated)
    (accuracy,) = [trace for trace in figure.data if trace.xaxis == "x2"]
    assert list(accuracy.x) == [0, 3, 6]
    assert accuracy.y[0] == pytest.approx(0.22)
    assert accuracy.line.color == COLORS[0]
    assert "not recorded by rloo" in figure.layout.annotations[1].text
    assert legend(figure) == ["grpo", "rloo"]
    for without in (compare(evaluated, not_evaluated, held_out=False), compare(not_evaluated)):
        assert {trace.xaxis for trace in without.data} == {"x"}


def test_a_metric_that_only_some_runs_have_names_the_others(make: Make) -> None:
    ppo = make("ppo", "a", change_rows=lambda step, row, answers: row.update(value_loss=1 / step))
    figure = compare(ppo, make("grpo", "b"), metric="value_loss")
    assert legend(figure) == ["ppo"]
    assert "not recorded by grpo" in figure.layout.annotations[0].text


def test_what_cannot_be_compared_is_said(make: Make, tmp_path: Path) -> None:
    run = make("grpo", "a")
    for nothing in ((), ({},)):
        with pytest.raises(ValueError, match="at least one run"):
            compare(*nothing)
    with pytest.raises(ValueError, match=r"no run recorded 'rewrad'.*kl, .*reward, .*rewards/right_answer"):
        compare(run, metric="rewrad")
    with pytest.raises(ValueError, match="finished a step"):
        compare(make("grpo", "empty", ready=0))
    with pytest.raises(ValueError, match="at least 1"):
        compare(run, smooth=0)
    with pytest.raises(TypeError, match="one after the other"):
        compare([run])
    with pytest.raises(FileNotFoundError, match="no record of a run"):
        compare(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


# Machado, Oliveira and Fernandes 2009, severity 1: what is seen without one of the three kinds of cones.
SEEN = {
    "all cones": numpy.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("kind", SEEN)
def test_colors_are_told_apart(kind: str) -> None:
    """In CIELAB, where about 2.3 is the least difference that is noticed; white is one of them."""

    def lab(color: str) -> numpy.ndarray:
        srgb = numpy.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = numpy.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        to_xyz = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        xyz = to_xyz @ numpy.clip(SEEN[kind] @ linear, 0, 1) / [0.9505, 1.0, 1.0888]
        x, y, z = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116)
        return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    assert len(COLORS) == 8
    for one, other in itertools.combinations([*COLORS, "#ffffff"], 2):
        assert numpy.linalg.norm(lab(one) - lab(other)) > 18, f"{one} and {other}"
