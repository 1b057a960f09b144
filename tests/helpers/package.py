"""Build a wheel and a source distribution, install each alone, and prune a small network with it.

    python -m tests.helpers.package

Each is installed into an empty environment, which sees the packages of this one (torch,
safetensors, jinja2, matplotlib) but not its polarprune. Nothing is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src")
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
PRUNE = """
import sys
from pathlib import Path
import torch
from torch import nn
import polarprune as pp

home = Path(sys.prefix).resolve()
assert home in Path(pp.__file__).resolve().parents, f"{pp.__file__} is not in {home}"

def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

torch.manual_seed(0)
model, x = network(), torch.randn(4, 6)
pruner = pp.Pruner(model, x, macs=0.5, steps=20)
optimizer = torch.optim.SGD(pruner.param_groups(lr=0.05))
pruner.attach(optimizer)
for _ in range(20):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
small = pruner.export()
pp.save(small, home / "small.safetensors")
again = pp.load(home / "small.safetensors", model=network())
assert torch.equal(again(x), small(x)) and again[0].out_features < 16
page = pruner.report().to_html()
assert page.rstrip().endswith("</html>") and "<style>" in page and "<svg" in page
print(f"{again[0].out_features} of 16 channels, a report of {len(page):,} characters")
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return what a command prints; a command that fails ends this script with its output."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:6]))}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def copy_source(folder: Path) -> Path:
    """Copy what a distribution is built from, so that nothing is left in the repository."""
    folder.mkdir()
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__")
            shutil.copytree(source, folder / name, ignore=unwanted)
        else:
            shutil.copy(source, folder / name)
    return folder


def build_wheel(source: Path, out: Path) -> Path:
    """Build the wheel of a folder or of a source distribution."""
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", out, source)
    return next(out.glob("*.whl"))


def prune_with(wheel: Path, home: Path) -> str:
    """Install a wheel into an empty environment and prune a network there."""
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel)
    own = Path(run(python, "-I", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    (own / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return run(python, "-I", "-c", PRUNE, cwd=home)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        source = copy_source(top / "source")
        run(sys.executable, "-c", BUILD_SDIST, top, cwd=source)
        sdist = next(top.glob("*.tar.gz"))
        for name, origin in (("wheel", source), ("sdist", sdist)):
            wheel = build_wheel(origin, top / name)
            print(f"{name}: {prune_with(wheel, top / f'{name}-environment')}", flush=True)


if __name__ == "__main__":
    main()
