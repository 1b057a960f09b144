"""The core needs only torch and safetensors; optional packages are imported when they are used."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.processes import environment

# What is loaded after `import polarprune` and was not before; with torch come packages of its own.
NEW_PACKAGES = """
import json, sys
import safetensors.torch, torch
before = set(sys.modules)
import polarprune
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(new - set(sys.stdlib_module_names))))
"""


def test_importing_the_library_imports_no_extra() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEW_PACKAGES], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout))
    assert "polarprune" in found and found <= {"polarprune", "torch"}
