"""The pictures as PNG files for reports, through matplotlib where it is installed.

Shell: writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_SEATS: Final = ("#b3452c", "#2b6ca3", "#3c7f4e", "#8a5aa8", "#b07d12")
_IDLE: Final = "#cfd4d8"
_ACCENT: Final = "#b3261e"
_CALM: Final = "#1f6f8b"
_GOOD: Final = "#2c7a4b"
_DPI: Final = 160
_SIZE: Final = (8.0, 4.5)


def draw(data: Mapping[str, Any], directory: Path) -> list[Path]:
    """One file for each picture of `collect`'s data -> their paths.

    Raises ImportError without matplotlib, OSError where the directory cannot be written.
    """
    # No display is needed, or touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Any, Any], None]] = {
        "gantt": _gantt,
        "padding": _padding,
        "knee": _knee,
        "spike": _spike,
        "frontier": _frontier,
    }
    written = []
    for name, picture in pictures.items():
        figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        picture(figure, data[name])
        path = directory / f"{name}.png"
        figure.savefig(path)
        written.append(path)
    return written


def _gantt(figure: Any, data: Mapping[str, Any]) -> None:
    runs = data["together"]
    end = max(run["end"] for run in runs)
    for axis, run in zip(figure.subplots(len(runs), 1, sharex=True), runs, strict=True):
        for step in range(round(run["end"])):
            for lane in range(run["lanes"]):
                axis.barh(lane, 0.92, left=step + 0.04, color="none", edgecolor=_IDLE, ls="--")
        for step, lane, owner in run["cells"]:
            axis.barh(lane, 0.92, left=step + 0.04, color=_SEATS[owner])
            axis.text(step + 0.5, lane, "ABCDE"[owner], ha="center", va="center", color="white")
        axis.set(xlim=(0, end), yticks=[], title=f"{run['name']}: {run['steps']} steps")
        axis.invert_yaxis()
        axis.spines[:].set_visible(False)
    axis.set_xlabel("step")


def _padding(figure: Any, data: Mapping[str, Any]) -> None:
    sweep = data["sweep"]
    sigma = [point["sigma"] for point in sweep]
    left, right = figure.subplots(1, 2)
    left.plot(sigma, [100 * point["waste"] for point in sweep], color=_ACCENT)
    left.set(xlabel="spread of output lengths (σ of the logarithm)", ylabel="padding, %")
    left.set_ylim(0, 100)
    for name, hue in (("continuous", _CALM), ("static", _ACCENT)):
        right.plot(sigma, [point[name] for point in sweep], color=hue, label=name)
    right.set(xlabel="spread of output lengths", ylabel="tokens per second", ylim=(0, None))
    right.legend(frameon=False)


def _knee(figure: Any, data: Mapping[str, Any]) -> None:
    axis = figure.subplots()
    for curve in data["curves"]:
        batch, ms = zip(*curve["points"], strict=True)
        axis.plot(batch, ms, label=f"{curve['kv']:,} KV tokens each")
    axis.axvline(data["ridge"], color=_CALM, ls="--", label=f"ridge: {data['ridge']:.0f}")
    axis.set(xlabel="sequences in the batch", ylabel="step time, ms", xlim=(0, 640), ylim=(0, 40))
    axis.set_title(data["text"], fontsize=9)
    axis.legend(frameon=False, fontsize=8)


def _spike(figure: Any, data: Mapping[str, Any]) -> None:
    panels = data["panels"]
    for axis, panel in zip(
        figure.subplots(len(panels), 1, sharex=True, sharey=True), panels, strict=True
    ):
        for at, gap in panel["gaps"]:
            hue = _ACCENT if gap > 2 * data["target_ms"] else _CALM
            axis.bar(at - gap, gap, width=gap, align="edge", color=hue, edgecolor="white", lw=0.4)
        axis.axvline(panel["ttft"], color=_GOOD, ls="--")
        axis.set_ylabel("ITL, ms")
        axis.set_title(
            f"{panel['name']}: worst {panel['worst']:.0f} ms, first token {panel['ttft']:.0f} ms",
            fontsize=9,
        )
    axis.set_xlabel("ms after the newcomer arrived; dashed: its first token")


def _frontier(figure: Any, data: Mapping[str, Any]) -> None:
    axis = figure.subplots()
    for seqs in sorted({point["seqs"] for point in data["points"]}):
        line = sorted(
            (point for point in data["points"] if point["seqs"] == seqs),
            key=lambda point: point["budget"],
        )
        rate, ttft = [p["rate"] for p in line], [p["ttft"] for p in line]
        axis.plot(rate, ttft, marker="o", label=f"max_num_seqs {seqs}")
    axis.set_yscale("log")
    axis.set(xlabel="output tokens per second", ylabel="p99 time to first token, ms")
    axis.set_title(data["workload"], fontsize=9)
    axis.legend(frameon=False, fontsize=8)
