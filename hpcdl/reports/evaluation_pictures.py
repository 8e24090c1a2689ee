"""Pictures of an evaluation's report (inference/evaluation_report.py): ROC, precision and recall, reliability."""

from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.errors import UsageError, blamed_on, printable
from hpcdl.reports.charts import Curve, curves
from hpcdl.reports.figures import COLOURS, Key, Picture, check_library, drawing, look, save

NAMES = ("roc", "precision-recall", "reliability")
GREY, SQUARE = COLOURS[-1], 3.6  # inches, the height of a picture whose axes have equal ranges
CHANCE = Curve(np.array([0.0, 1.0]), np.array([0.0, 1.0]), GREY, 1, width=1.0)


def check(folder: Path, force: bool) -> None:
    """Raise UsageError without matplotlib, or if a picture exists already (without `force`)."""
    check_library()
    for name in NAMES:
        if not force and (path := folder / f"{name}.png").exists():
            raise UsageError(f"--pictures: {path} exists already; give another folder, or --force to replace it")


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the report has data for into files of NAMES in `folder`; return their paths. Raises UsageError."""
    with blamed_on(f"--pictures {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    pictures, paths = pictures_of(report), list[Path]()
    with drawing():
        for picture in pictures:
            paths.append(folder / f"{picture.name}.png")
            save(picture, paths[-1])
    return paths


def pictures_of(report: dict[str, Any]) -> list[Picture]:
    """Return the pictures. Without the probabilities of all rows there is no ROC, and no precision against recall."""
    drawn, of = [], f"{report['split']} part of {printable(report['data'])}"
    curves_of = [curve for curve in report["curves"] if curve["roc_auc"] is not None]
    if curves_of:
        roc = [(np.array([0, *each["false_positive_rate"]]), np.array([0, *each["recall"]])) for each in curves_of]
        keys = [("roc_auc", "AUC"), ("average_precision", "average precision")]
        both = [(np.array(each["recall"]), np.array(each["precision"])) for each in curves_of]
        for name, title, lines, (area, said), axes_of in (
            ("roc", f"ROC, {of}", roc, keys[0], ("false positive rate", "recall (true positive rate)")),
            ("precision-recall", f"Precision and recall, {of}", both, keys[1], ("recall", "precision")),
        ):
            legend = [
                Key(f"{printable(each['class'])}, {said} {each[area]:.4f}", *look(number))
                for number, each in enumerate(curves_of)
            ]
            drawn.append(square(name, title, lines, legend, axes_of, chance=name == "roc"))
    bins = [each for each in report["calibration"] if each["rows"]]
    if "calibration_error" in report["scores"] and bins:
        line = tuple(np.array([each[name] for each in bins]) for name in ("probability", "accuracy"))
        legend = [Key(f"the likeliest class, calibration error {report['scores']['calibration_error']:.4f}", *look(0))]
        names = "mean probability", "accuracy"
        drawn.append(square("reliability", f"Reliability, {of}", [line], legend, names, marked=True))
    return drawn


def square(
    name: str,
    title: str,
    lines: list[Any],
    legend: list[Key],
    axes_of: tuple[str, str],
    chance: bool = True,
    marked: bool = False,
) -> Picture:
    """Return a picture of curves (x, y) from 0 to 1. chance: with the diagonal. marked: with a dot for each point."""

    def draw(axes: Any) -> None:
        found = [Curve(x, y, *look(number), marked=marked) for number, (x, y) in enumerate(lines)]
        curves(axes, [*([CHANCE] if chance else []), *found], axes_of[0], axes_of[1], free=False)
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)

    return Picture(name, title, "", draw, legend, SQUARE)
