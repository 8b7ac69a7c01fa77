"""How many tests there are, and how long they take: those of the project, and of the template.

    python benchmarks/suites.py
    python benchmarks/suites.py --only project --words tests/test_structure.py     # a quick look

Runs what `make test` runs, in the environment that it made: `.venv/bin/python`.

Prints and writes `results/suites.json`.
"""

import sys

import measurements
import rounds

ABOUT = ""  # whatever is there: a result is of its commit
FOLDERS = {"project": measurements.PROJECT, "template": measurements.ROOT}
# As the two Makefiles call pytest.
CALLS = {
    "project": [["-n", "auto"]],
    "template": [
        ["-n", "2", "--dist", "loadfile", "--ignore", "tests/test_renders.py"],
        ["tests/test_renders.py"],
    ],
}


def measure(name: str, words: list[str]) -> dict[str, float]:
    """Run all tests of a folder."""
    sys.path.append(str(measurements.ROOT))
    from faults.suites import run  # noqa: PLC0415 - it imports torch

    begun = rounds.Reading.now()
    passed = sum(run(FOLDERS[name], [*call, *words]) for call in CALLS[name])
    took = rounds.Reading.now().since(begun)
    return {"passed": passed, "seconds": took.seconds, "cpu_seconds": took.cpu_seconds}


def main() -> None:
    """Run both, and write the result."""
    parser = rounds.parser(__doc__, rounds=1)
    parser.add_argument("--words", nargs="*", default=[], help="for pytest: fewer tests")
    options = parser.parse_args()
    if options.contender:
        rounds.give(measure, options.contender, options.words)
        return
    measurements.write(
        options.results / "suites.json",
        "The tests",
        "Those of the generated project by themselves, and those of the template, which run the "
        "project's once more in a project that they make.",
        measurements.measured(*rounds.compare(__file__, FOLDERS, options)),
    )


if __name__ == "__main__":
    main()
