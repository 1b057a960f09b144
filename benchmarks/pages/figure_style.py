"""What all figures share: colours, line styles and empty panels."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart. Marks and dashes tell lines
# apart in black and white.
BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#767676"
STYLES = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, ":", "^"), (PINK, "-.", "D"))


def panels(count: int, width: float = 3.4, height: float = 2.8) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side; width and height are those of one panel."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e5e5", lw=0.6)
        axis.set_axisbelow(True)
    return figure, axes
