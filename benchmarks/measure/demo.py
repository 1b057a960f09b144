"""Claim: half of the MACs, set in advance and met, and removal changes no prediction.

Runs the demonstration with three seeds. Writes numbers/demo.json (the result with hardware,
versions and number of runs) and the table in README.md:

    python -m benchmarks.measure.demo
"""

import statistics

from benchmarks.store import ROOT, write_numbers
from polarprune.cli.demo import Demo, Settings
from polarprune.cost.timing import environment

SEEDS = (0, 1, 2)
MARKS = ("<!-- demo table -->", "<!-- end of demo table -->")


def measure() -> dict:
    runs = []
    for seed in SEEDS:
        report, _ = Demo(Settings(seed=seed)).run()
        facts = {"seed": seed, "before": report.before, "after": report.after}
        facts["relative_difference"] = max(report.proof.values())
        runs.append({**facts, **report.results})
        print(f"seed {seed}: {[row['accuracy'] for row in report.results['table']]}")
    return {
        "claim": __doc__.split("\n\n")[0],
        "budget": Settings.budget,
        **environment(),
        "runs": runs,
    }


def spread(values: list[float], form: str) -> str:
    return f"{statistics.mean(values):{form}} ± {statistics.stdev(values):{form}}"


def table(result: dict) -> str:
    runs = result["runs"]
    lines = ["| | accuracy | MACs | params |", "|---|---|---|---|"]
    for number, row in enumerate(runs[0]["table"]):
        rows = [run["table"][number] for run in runs]
        shares = {
            key: [100 * r[key] / run["before"][key] for r, run in zip(rows, runs, strict=True)]
            for key in ("macs", "params")
        }
        cells = [spread([100 * r["accuracy"] for r in rows], ".2f") + " %"]
        cells += [
            "100 %" if min(values) == 100 else spread(values, ".2f") + " %"
            for values in shares.values()
        ]
        lines.append(f"| {row['stage']} | " + " | ".join(cells) + " |")
    worst = max(run["relative_difference"] for run in runs)
    same = sum(run["identical_predictions"] for run in runs)
    gain = [run["latency_ms"]["before"] / run["latency_ms"]["after"] for run in runs]
    lines += [
        "",
        f"The budget is {result['budget']:.0%} of the MACs. Removal changes no prediction on the "
        f"{runs[0]['test_images']} test images in {same} of {len(runs)} runs; outputs differ by at "
        f"most {worst:.1e} (relative). A batch of {runs[0]['latency_ms']['batch']} runs "
        f"{spread(gain, '.2f')} times as fast. Mean ± standard deviation of {len(runs)} runs on "
        f"{result['machine']}, torch {result['versions']['torch']}, measured by "
        f"[benchmarks/measure/demo.py](benchmarks/measure/demo.py).",
    ]
    return "\n".join(lines)


def write_readme(text: str) -> None:
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    readme.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    result = measure()
    write_numbers("demo", result, sort_keys=False)
    write_readme(table(result))
