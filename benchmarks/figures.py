"""Write every figure of the README and of docs/ that comes from a file in results/.

    python benchmarks/figures.py            # write the pages, and list results that are stale
    python benchmarks/figures.py --check    # write nothing; exit code 1 if a page would change

A result is stale if the code that it is about has changed since: docs/measured.md says so. To
measure it again: `make measure`, or the command that is listed. Needs no library: any Python from
3.11 on will do.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measurements
from measurements import ROOT, Result, number, table

MARKS = "<!-- figures: {name}, by `python benchmarks/figures.py` -->", "<!-- /figures -->"
# Within a sentence: `<!-- figure: memory, ours, MB_of_pss -->132<!-- /figure -->`; see `figure`.
FIGURE = re.compile(r"(<!-- figure: (.+?) -->).*?(<!-- /figure -->)")
SPLIT = measurements.PROJECT / "docs" / "model_parallel.md"
SPLIT_MARKS = "<!-- measured -->", "<!-- /measured -->"
ARTICLES = "articles.md", "articles.ko.md"
SCALE = "scale", "search"  # results whose tables docs/scale.md has
ELSEWHERE = *SCALE, "model_parallel", "faults"  # results that docs/measured.md leaves to others
MISSING = "not measured yet"
RANGES = r" Medians \(lowest to highest\)(; ratios are taken within a round)?\."  # said once a page

# Contenders of results/gpu.json are commands of gpu.py.
ON_GPU = "benchmarks/gpu_steps.py --device cuda --results RESULTS repeat --cifar CIFAR "
PEER = "benchmarks/gpu_steps.py --device cuda --results RESULTS peers --cifar CIFAR --peers PEERS "
# Preset, task, and which contender of which result.
REACHED = [
    (
        "`shapes`",
        "10 drawn shapes, 20,000 images to learn from: `make demo`",
        "recipes-shapes",
        "shapes",
    ),
    (
        "`shapes`",
        "the same under `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`",
        "recipes-shapes",
        "shapes:AVX512_CORE_BF16",
    ),
    ("`shapes`", "the same under `ONEDNN_MAX_CPU_ISA=AVX2`", "recipes-shapes", "shapes:AVX2"),
    (
        "`cifar10_speed`",
        "CIFAR-10 as JPEGs of quality 75; the 10,000 test images",
        "recipes-cifar10_speed",
        "cifar10_speed",
    ),
    (
        "`folder`",
        "5 kinds of flowers, 300 photographs to learn from, 100 to judge by",
        "recipes-folder",
        "folder",
    ),
    (
        "`cifar10`",
        "CIFAR-10 as JPEGs of quality 75, on a GPU with other work",
        "gpu",
        f"{ON_GPU}--seed 0 --words 'cifar10'",
    ),
    (
        "`cifar10_best`",
        "the same",
        "gpu",
        f"{ON_GPU}--seed 0 --words 'cifar10_best'",
    ),
]
METHODS = ("probe", "finetune", "logistic", "fastai", "timm")  # of transfer.py
RELEASE = measurements.version().partition(".dev")[0]  # the newest, or the next one
NOT_REACHED = [
    (
        "`imagenet_rn50_16`, `_88`, `imagenet_vit_s`",
        "ImageNet; built from published recipes, tested to follow their schedules",
        "not reproduced",
    ),
]


def with_torch(result: Result) -> str:
    """The machine of a result, and its version of torch."""
    torch = result["versions"]["torch"].partition("+")[0]
    return f"{measurements.machine_text(result)}; torch {torch}"


def with_libraries(result: Result) -> str:
    """The machine of a result, its memory, and all libraries."""
    memory = f"{result['machine']['memory_gb']} GB"
    return "; ".join(
        (measurements.machine_text(result), memory, measurements.libraries_text(result))
    )


class Machines:
    """Machines by letters, and a line for each."""

    def __init__(self, text: Callable[[Result], str] = with_torch) -> None:
        self.text = text
        self.letters: dict[str, str] = {}

    def letter(self, result: Result) -> str:
        """The letter of the machine on which something was measured."""
        return self.letters.setdefault(self.text(result), chr(ord("A") + len(self.letters)))

    def cell(self, result: Result) -> str:
        """Where, when and of which code something was measured, and whether it is stale."""
        stale = measurements.staleness(result)
        return self.place(result, measurements.state(result)) + f"; **{stale}**" * bool(stale)

    def place(self, result: Result, state: str) -> str:
        """Where, when and of which `state` of the code something was measured."""
        return f"{self.letter(result)}, {result['date']}, {state}"

    def lines(self) -> str:
        """What the letters stand for."""
        return "\n".join(f"- {letter}: {machine}" for machine, letter in self.letters.items())


def reached(machines: Machines) -> str:
    """What presets reach: a row for each."""
    rows = []
    for preset, task, name, contender in REACHED:
        result = find(name)
        found = result and result["measured"].get(contender)
        if not found:
            rows.append((preset, task, MISSING, "", "", "", "", ""))
            continue
        minutes, cpu = (
            f"{found[key]['median']:.1f}" if key in found else ""
            for key in ("minutes", "cpu_minutes")
        )
        command = f"`{result['command']}`"
        seeds = str(result["rounds"] if "deviation" in found["top1_percent"] else 1)
        top1 = score(found["top1_percent"])
        rows.append((preset, task, top1, seeds, minutes, cpu, command, machines.cell(result)))
    rows += [(*row, "", "", "", "", "") for row in NOT_REACHED]
    heads = ("preset", "task", "top-1, %", "seeds", "minutes", "CPU minutes", "command", "measured")
    return table(heads, rows, numbers=False)


def transferred(machines: Machines) -> str:
    """What pretrained weights reach, beside others: a row for each set and network."""
    result, rows = find("transfer"), []
    if result is None:
        return f"{MISSING}."
    found = result["measured"]
    for task in dict.fromkeys(name.partition(":")[2] for name in found):
        data, _, network = task.partition(":")
        row = [data, network]
        for method in METHODS:
            row.append(score(found.get(f"{method}:{task}", {}).get("best_percent")))
        for method in ("finetune", "fastai"):
            row.append(number(found[f"{method}:{task}"]["cpu_minutes"]["median"]))
        rows.append([*row, number(found[f"finetune:{task}"]["first_seconds"]["median"])])
    heads = ("images", "weights", *METHODS, "CPU minutes", "fastai's", "seconds to the first")
    facts = f"`{result['command']}`, {result['rounds']} seeds; {machines.cell(result)}"
    return f"{table(heads, rows)}\n\n{facts}"


def score(found: dict[str, float] | None) -> str:
    """Mean and standard deviation of a score; nothing where there is none."""
    if found is None:
        return ""
    spread = f" ± {found['deviation']:.1f}" if "deviation" in found else ""
    return f"{found['mean']:.1f}{spread}"


def loaders(result: Result) -> str:
    """How much CPU time an image takes, as a share of the others'."""
    found = result["measured"]
    ours = found["ours:uint8"]
    jpeg, raw = (
        found[f"ours-prepared-{form}:uint8"]["cpu_ms x pil-v1"]["median"]
        for form in ("jpeg", "raw")
    )
    text = f"uint8 batches at {ours['cpu_ms x pil-v1']['median']:.2f} of what PIL and torchvision "
    text += f"v1 take for float32; prepared {jpeg:.2f} (JPEG), {raw:.2f} (raw)"
    peer = best_peer(found)
    ratio = ours["cpu_ms"]["median"] / found[f"{peer}:uint8"]["cpu_ms"]["median"]
    return f"{text}; {ratio:.2f} of the best peer, {peer}"


def best_peer(found: dict[str, Any]) -> str:
    """The fastest of the other loaders of uint8 batches."""
    peers = {
        name: row["cpu_ms"]["median"]
        for name, row in found.items()
        if name.endswith(":uint8") and not name.startswith(("ours", "bare"))
    }
    return min(peers, key=peers.__getitem__).removesuffix(":uint8")


def resident(result: Result) -> str:
    """How many images per second."""
    ours = result["measured"]["ours"]
    ratio = ours["images_per_second x dataloader-pil"]["median"]
    rate = ours["images_per_second"]["median"]
    return f"{number(rate)} images/s: {ratio:.0f} x a DataLoader with PIL transforms"


def policies(result: Result) -> str:
    """CPU time per image, and how it compares."""
    found = result["measured"]
    parts = []
    for policy, name in (("trivialaugment", "TrivialAugment"), ("randaugment", "RandAugment")):
        ours = found[f"{policy}:ours"]
        ratios = (ours[f"cpu_ms x {policy}:torchvision-{way}"]["median"] for way in ("v1", "v2"))
        parts.append(
            "{} {} ms, {:.2f} and {:.2f} of torchvision's (PIL, tensors)".format(
                name, number(ours["cpu_ms"]["median"]), *ratios
            )
        )
    return "; ".join(parts)


def training(result: Result) -> str:
    """How many images per second, beside the others."""
    names = {"ours": "ours", "timm": "timm", "lightning": "Lightning", "examples": "examples"}
    ratio = result["measured"]["ours"]["images_per_second x examples"]["median"]
    return f"images/s: {rates(result, names)}; ours is {ratio:.1f} x the loop of pytorch/examples"


def training_on_gpu(result: Result) -> str:
    """How many images per second from files and from a cache, beside the others."""
    names = {"ours-streamed": "from JPEG files", "ours": "from a prepared cache"}
    names |= {"ours-synthetic": "from noise in the GPU's memory"}
    names |= {"timm": "timm", "lightning": "Lightning", "examples": "examples"}
    ratio = result["measured"]["ours-streamed"]["images_per_second x timm"]["median"]
    return f"images/s: {rates(result, names)}; from files {ratio:.2f} x timm"


def rates(result: Result, names: dict[str, str]) -> str:
    """Images per second of contenders, each after its name; of those that were measured."""
    found = result["measured"]
    return ", ".join(
        f"{name} {number(found[key]['images_per_second']['median'])}".strip()
        for key, name in names.items()
        if key in found
    )


def precision(result: Result) -> str:
    """How many times as fast as fp32 the others are, and how long `auto` measured."""
    gains: dict[str, list[str]] = {}
    probes = []
    for name, found in result["measured"].items():
        task, _, kind = name.partition(":")
        if kind != "fp32":
            gain = found[f"images_per_second x {task}:fp32"]["median"]
            gains.setdefault(task, []).append(number(gain))
        if "probe_seconds" in found:
            probes.append(found["probe_seconds"]["median"])
    rows = "; ".join(f"{task} {', '.join(each)}" for task, each in gains.items())
    return (
        f"x fp32's images/s, bf16 and auto: {rows}; "
        f"`auto` measured for {number(min(probes))} to {number(max(probes))} s"
    )


def overhead(result: Result) -> str:
    """How much more a step takes."""
    found = result["measured"]["in turns"]
    more, bare = found["percent_more"], found["bare_ms_per_step"]
    return (
        f"{measurements.cell(more)} % more than seven lines by hand, of {number(bare['median'])} ms"
    )


def memory(result: Result) -> str:
    """What an index costs."""
    many, few = (result["measured"][name]["MB_of_pss"]["median"] for name in ("ours", "ours:few"))
    return f"{many - few:.0f} MB of PSS for each worker"


def faults(result: Result) -> str:
    """How many promises were kept."""
    return f"{promises(result)} ([table](faults.md))"


def suites(result: Result) -> str:
    """How many tests passed, and in which time."""
    found = {
        name: (f"{each['passed']['median']:.0f}", clock(each["seconds"]["median"]))
        for name, each in result["measured"].items()
    }
    return "the project's: {} in {}; the template's, which run those once more: {} in {}".format(
        *found["project"], *found["template"]
    )


def gpu(result: Result) -> str:
    """How many tests and faults passed on a GPU."""
    rows = result["measured"].values()
    ends = ("passed", "failed")
    passed, failed = (sum(row[end]["median"] for row in rows if end in row) for end in ends)
    return f"{passed:.0f} tests and faults passed, {failed:.0f} failed"


# What was measured, in which result, and what it says.
SUMMARY: list[tuple[str, str, Callable[[Result], str]]] = [
    ("photographs, 2 workers: CPU time per image", "loaders", loaders),
    ("the same on a CPU with AMX", "loaders-amx", loaders),
    ("32 x 32 images in memory, augmented and normalized", "resident", resident),
    ("224 x 224 photographs: CPU time per image of a policy", "policies", policies),
    ("ResNet-18, 128 pixels, photographs, whole training", "training", training),
    ("the same on a CPU with AMX, which has bf16", "training-amx", training),
    ("ResNet-50, 224 pixels, compiled, on a GPU", "training-cuda", training_on_gpu),
    ("training steps alone, by `--precision`", "precision", precision),
    ("the loop itself, beside a small model", "overhead", overhead),
    ("an index of 1,000,000 files", "memory", memory),
    ("faults injected for real", "faults", faults),
    ("all tests", "suites", suites),
    ("what only a GPU can show", "gpu", gpu),
]


def summary(machines: Machines) -> str:
    """The results in a line each."""
    rows = []
    for what, name, says in SUMMARY:
        result = find(name)
        if result is None:
            rows.append((what, MISSING, "", ""))
        else:
            rows.append((what, says(result), f"`{result['command']}`", machines.cell(result)))
    heads = ("what", "result", "command", "measured")
    return table(heads, rows, numbers=False)


def photographs_to_batches(result: Result) -> str:
    """CPU time per photograph, and that of others, the fastest first."""
    names = {"torchvision-v2": "torchvision", "dali": "DALI", "timm": "timm"}
    found = {key: row["cpu_ms"]["median"] for key, row in result["measured"].items()}
    others = sorted(names, key=lambda key: found[f"{key}:uint8"])
    times = ", ".join(f"{names[key]} {number(found[f'{key}:uint8'])}" for key in others)
    return f"{number(found['ours:uint8'])}, {times} ms of CPU time per image (less is better)"


def whole_training(result: Result) -> str:
    """Images per second of a whole training, from JPEG files."""
    ours = "ours-streamed" if result["machine"]["gpu"] else "ours"
    names = {ours: "", "timm": "timm", "lightning": "Lightning", "examples": "pytorch/examples"}
    return f"{rates(result, names)} images/s"


def beside_airbench(result: Result) -> str:
    """Seconds and top-1 of airbench's short recipe; top-1 of the long ones, a run of each."""
    found = result["measured"]
    short = "cifar10_speed --model.name airbench --epochs 8 --augment.cutout 0 --augment.min-size 0"
    rows = {
        "": found[f"{ON_GPU}--runs 5 --words '{short}'"],
        "airbench94_muon ": found[f"{PEER}--script airbench94_muon --runs 5"],
    }
    times = ", ".join(
        f"{name}{number(row['seconds']['median'])} s to {row['top1_percent']['mean']:.1f} %"
        for name, row in rows.items()
    )
    best = found[f"{ON_GPU}--seed 0 --words 'cifar10_best'"]["top1_percent"]["mean"]
    longest = found[f"{PEER}--script airbench96_faster --mode default"]["top1_percent"]["mean"]
    return f"{times}; in 100 epochs {best:.1f} %, airbench96_faster in 45 {longest:.1f} %"


def fine_tuning(result: Result) -> str:
    """Mean top-1 over the sets of photographs that all have."""
    found = result["measured"]
    tasks = [name.partition(":")[2] for name in found if name.startswith("timm:")]
    ways = {
        "": "finetune",
        "logistic regression on its features ": "logistic",
        "fastai ": "fastai",
        "timm ": "timm",
    }
    texts = []
    for title, way in ways.items():
        scores = [found[f"{way}:{task}"]["best_percent"]["mean"] for task in tasks]
        texts.append(f"{title}{statistics.mean(scores):.1f}")
    return f"{', '.join(texts)} % top-1, mean of {len(tasks)} sets"


def exact_resume(result: Result) -> str:
    """How often a run was killed, and what came of it."""
    row = next(row for row in result["faults"] if row["fault"].startswith("`kill -9` of the whole"))
    return f"{row['tries']} kills: {row['seen'].partition(';')[0]}"


def promises(result: Result) -> str:
    """How many of the promises in the table of faults were kept."""
    ends = [row["verdict"] for row in result["faults"]]
    untried = ends.count("not run here")
    kept = f"{ends.count('**kept**')} of {len(ends) - untried} promises kept"
    return f"{kept}, {untried} not run here" if untried else kept


# The rows of the README: what was measured, in which result, and what it says.
HIGHLIGHTS: list[tuple[str, str, Callable[[Result], str]]] = [
    ("photographs to uint8 batches", "loaders", photographs_to_batches),
    ("ResNet-50 from JPEG files, one H200", "training-cuda", whole_training),
    ("CIFAR-10 as JPEGs of quality 75, one H200", "gpu", beside_airbench),
    ("ResNet-18 at 128 pixels on a CPU", "training", whole_training),
    ("the same on a CPU with AMX", "training-amx", whole_training),
    ("fine-tuning EfficientNet-Lite0 on 150 photographs", "transfer", fine_tuning),
    ("`kill -9` at random moments, then resume", "faults", exact_resume),
    ("faults injected for real", "faults", promises),
]


def highlights() -> str:
    """The figures of the README, each with the machine, and the version that was measured."""
    machines = Machines()
    rows = []
    for what, name, says in HIGHLIGHTS:
        result = measurements.load(name)
        state = measurements.state(result)
        version = state if state.startswith("version") else f"before {RELEASE}"
        rows.append((what, says(result), machines.place(result, version)))
    heads = ("", "Pretuned first, then others", "machine, date, version")
    return f"{table(heads, rows, numbers=False)}\n\n{machines.lines()}"


def find(name: str) -> Result | None:
    """A result of the repository, if there is one."""
    return measurements.load(name) if (measurements.RESULTS / f"{name}.json").exists() else None


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def all_measured() -> str:
    """docs/measured.md: every result but the faults, with all of its numbers."""
    machines = Machines(with_libraries)
    parts = [
        "# What was measured",
        "Every comparison of `benchmarks/`, with command, rounds, [machine](#machines) and date; "
        "several processes are in [scale.md](scale.md), faults in [faults.md](faults.md). "
        "Numbers are medians (lowest to highest), ratios within a round, unless a text says else. "
        "`python benchmarks/figures.py` writes this page from `benchmarks/results/`.",
        "## In short",
        summary(machines),
        "## What presets reach",
        "Accuracy on the validation images, mean ± standard deviation of single runs. With a few "
        "hundred photographs, a difference of a few points may be chance.",
        reached(machines),
        "## What pretrained weights reach",
        "The best evaluation on other images, in %: top-1 or, of the multi-label `scenes`, mean "
        "average precision. All begin with the same weights, and learn from as many photographs as "
        "`--images` says. `probe` and `finetune` are ours: the second begins with the first. "
        "`logistic` is scikit-learn on frozen features, `fastai` is "
        "`vision_learner(...).fine_tune(5)`, `timm` its train.py.",
        transferred(machines),
    ]
    for name in sorted(path.stem for path in measurements.RESULTS.glob("*.json")):
        result = measurements.load(name)
        if name not in ELSEWHERE:
            times = f"{result['rounds']} round{'s' * (result['rounds'] != 1)}"
            facts = f"`{result['command']}`, {times}; {machines.cell(result)}"
            findings = re.sub(RANGES, "", measurements.findings(result), count=1)
            parts += [findings, facts]
    return "\n\n".join([*parts, "## Machines", machines.lines()]) + "\n"


def all_faults() -> str:
    """docs/faults.md: what was injected, how often, and what came of it."""
    result = measurements.load("faults")
    rows = [
        (row["fault"], f"{row['tries']:,}", row["promise"], row["verdict"], row["seen"])
        for row in result["faults"]
    ]
    parts = [
        "# Faults",
        "Each row is a fault that was injected for real into the generated project: processes\n"
        "were killed and stopped, disks were full, files were damaged. `make faults` makes\n"
        "this table again; a few tries of most rows are part of `make test`.",
        table(("fault", "tries", "promise", "", "seen"), rows, numbers=False),
        f"{promises(result)}.",
        f"`{result['command']}`, {result['date']}, {measurements.state(result)}: "
        f"{clock(result['seconds'])} minutes on {measurements.machine_text(result)}; "
        + measurements.libraries_text(result)
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def figure(words: str) -> str:
    """One figure: `result, contender, number` is its median.

    With `, mean` it is mean ± deviation, with `, range` median (lowest to highest) or its interval.

    The name of a result alone is its machine, date and version. Of faults,
    `faults, promises` is how many were kept, and `faults, FAULT, tries` how often the first one
    whose description begins with FAULT was injected.
    """
    name, *place = words.split(", ")
    result = measurements.load(name)
    if not place:
        return circumstances(result)
    if place == ["promises"]:
        return promises(result)
    contender, key, *kind = place
    if "faults" in result:
        row = next(row for row in result["faults"] if row["fault"].startswith(contender))
        return f"{row[key]:,}"
    found = result["measured"][contender][key]
    if kind == ["mean"]:
        return measurements.cell({key: found[key] for key in ("mean", "deviation")})
    return measurements.cell(found) if kind == ["range"] else number(found["median"])


def circumstances(result: Result) -> str:
    """Where, when and of which code something was measured, in words."""
    where = measurements.machine_text(result)
    return f"{where}, {result['date']}, {measurements.state(result)}"


def article(path: Path) -> str:
    """The page of articles at `path`, with its figures as they should be."""
    text = path.read_text(encoding="utf-8")
    return FIGURE.sub(lambda match: f"{match[1]}{figure(match[2])}{match[3]}", text)


def pages() -> dict[Path, str]:
    """Every page with figures, as it should be."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = placed(readme, text, [mark.format(name="highlights") for mark in MARKS], highlights())
    docs = ROOT / "docs"
    whole = {docs / "measured.md": all_measured(), docs / "faults.md": all_faults()}
    block = compared("model_parallel")
    whole[SPLIT] = placed(SPLIT, SPLIT.read_text(encoding="utf-8"), SPLIT_MARKS, block)
    scale = docs / "scale.md"
    others = (docs / "design.md", *(docs / name for name in ARTICLES), scale)
    whole |= {path: article(path) for path in others}
    for name in SCALE:
        marks = [mark.format(name=name) for mark in MARKS]
        whole[scale] = placed(scale, whole[scale], marks, compared(name))
    return {readme: text, **whole}


def placed(path: Path, text: str, marks: Sequence[str], block: str) -> str:
    """The text of a page with `block` between its two marks."""
    begin, end = map(re.escape, marks)
    text, count = re.subn(
        f"({begin}).*?({end})",
        lambda match: f"{match[1]}\n\n{block}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"{path} has {count} places for {marks[0]}"
    return text


def compared(name: str) -> str:
    """A result as another page has it: its table, what was asked for, its machine and command."""
    result = find(name)
    if result is None:
        return f"On a CPU: {MISSING}."
    parts = [f"{result['about']} {circumstances(result)}, `{result['command']}`."]
    parts += [measurements.numbers_table(result["measured"])]
    parts += ["\n".join(measurements.goal_lines(result["goals"]))] * bool(result["goals"])
    return "\n\n".join(parts)


def differing() -> Iterator[tuple[Path, str]]:
    """The pages that are not as they should be, and how they should be."""
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield path, text


def main() -> int:
    """Write the pages, or tell which differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    for path in sorted(measurements.RESULTS.glob("*.json")):
        result: dict[str, Any] = measurements.load(path.stem)
        stale = measurements.staleness(result)
        if stale:
            took = f"{clock(result['seconds'])} minutes" if result["seconds"] else "?"
            print(f"stale: {path.stem}: {stale}\n    {result['command']}    ({took})")
    code = 0
    for path, text in list(differing()):
        print(f"{path.relative_to(ROOT)} {'differs' if options.check else 'is written'}")
        if options.check:
            code = 1
        else:
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
