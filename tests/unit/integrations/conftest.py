"""Import torchvision first: the frameworks import it, and cannot do so everywhere.

Ultralytics reads its settings when it is imported: a folder of its own, and nothing is installed.
"""

import os
import tempfile

from benchmarks.measure.import_torchvision import import_torchvision

os.environ.update(YOLO_CONFIG_DIR=tempfile.mkdtemp(), YOLO_OFFLINE="true", YOLO_AUTOINSTALL="false")
import_torchvision()
