"""torchvision is loaded first: the frameworks import it, and cannot do so everywhere."""

from benchmarks.measure.import_torchvision import import_torchvision

import_torchvision()
