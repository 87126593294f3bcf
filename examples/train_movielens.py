"""Next-item recommendation on MovieLens-100K with PMA: MXFP8, BF16 and FP32 from the same start.

A user's history is a jagged segment of events (TorchRec embeddings of item, rating and recency, summed). PMA pools it
into a few vectors, a small head turns those into a user vector, and a candidate item is scored by its dot product with
that vector. The label is binary, the next item against drawn negatives, so loss, AUC and normalised entropy (NE) are
those of a ranking model. Every precision sees the same initial weights, batches and negatives.

    python examples/train_movielens.py                 # a table, curves and a checkpoint
    python examples/train_movielens.py --seeds 3       # is MXFP8 within the noise between seeds?
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from movielens import Batch, training_targets
from next_item import PRECISIONS, TOP_K, Judge, Metrics, NextItemModel, Task, make_task
from tqdm import tqdm

import pma

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LEARNING_RATE = 6e-3  # the peak of a one-cycle schedule


@dataclass(frozen=True)
class Plan:
    """How long to train, and whether the dense part is compiled."""

    epochs: int
    batch_size: int
    per_user: int  # training interactions drawn from every user in an epoch
    is_compiled: bool


@dataclass(frozen=True)
class Run:
    """One trained model and what was seen on the way."""

    precision: str
    seed: int
    model: NextItemModel
    losses: list[float]  # running training loss, one a step
    validation_ne: list[float]  # one an epoch
    test: Metrics
    seconds: float  # training steps only, without the first one, which compiles


def build_model(task: Task, precision: str, is_compiled: bool) -> NextItemModel:
    """Make a model on torch's global random state; compiling in place keeps the names in its state_dict."""
    model = NextItemModel(task.interactions.num_items, precision)
    if is_compiled:
        model.scorer.pooler.compile(fullgraph=True)
    return model


def train(task: Task, precision: str, seed: int, plan: Plan) -> Run:
    """Train one model; it is judged as it stands after the last epoch, where the learning rate has come to 0."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = build_model(task, precision, plan.is_compiled)
    generator = torch.Generator().manual_seed(seed)
    num_steps = plan.epochs * math.ceil(task.interactions.num_users * plan.per_user / plan.batch_size)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=0.1)
    losses, validation_ne, seconds = [], [], []
    with tqdm(total=num_steps, desc=f"{precision:5} seed {seed}", unit="step") as progress:
        for _ in range(plan.epochs):
            users, targets = training_targets(task.interactions, plan.per_user, generator)
            model.train()
            for batch_users, batch_targets in zip(
                users.split(plan.batch_size), targets.split(plan.batch_size), strict=True
            ):
                batch = task.training.make(batch_users, batch_targets, generator)
                start = time.perf_counter()
                loss = train_step(model, batch, optimizer)
                seconds.append(time.perf_counter() - start)
                schedule.step()
                losses.append(loss if not losses else 0.98 * losses[-1] + 0.02 * loss)
                progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
                progress.update()
            validation_ne.append(evaluate(model, task.validation).ne)
    return Run(precision, seed, model, losses, validation_ne, evaluate(model, task.test), sum(seconds[1:]))


def train_step(model: NextItemModel, batch: Batch, optimizer: torch.optim.Optimizer) -> float:
    """Take one step of binary cross entropy; return the loss before it."""
    loss = F.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: NextItemModel, batch: Batch) -> Metrics:
    """Judge a model on a held-out batch, each positive against NUM_RIVALS negatives."""
    judge = Judge()
    judge.update(model.eval()(batch.features), batch.labels)
    return judge.metrics()


def check_checkpoint(task: Task, run: Run, path: Path, is_compiled: bool) -> None:
    """Save the run's weights, load them into a new model and raise RuntimeError unless it is equally good."""
    torch.save(run.model.state_dict(), path)
    restored = build_model(task, run.precision, is_compiled)
    restored.load_state_dict(torch.load(path, weights_only=True), strict=True)
    metrics = evaluate(restored, task.test)
    if metrics != run.test:
        raise RuntimeError(f"{path} does not restore the model: {run.test} before saving, {metrics} after loading")
    print(f"\n{path}: the {run.precision} model, restored with the same test metrics")


@torch.no_grad()
def print_recommendations(task: Task, run: Run, user: int = 0, count: int = 5) -> None:
    """Print the latest events of one user and the items that the model would show next."""
    interactions = task.interactions
    end = interactions.user_offsets[user + 1]
    every_item = torch.arange(interactions.num_items)[None]
    logits = run.model.eval()(task.training.features(torch.tensor([user]), end[None], every_item))[0]  # [I]
    logits[interactions.seen()[user]] = -math.inf
    latest = interactions.items[end - count : end].tolist()
    print(f"\nuser {user + 1} saw  " + ", ".join(interactions.titles[item] for item in latest))
    print("would like  " + ", ".join(interactions.titles[item] for item in logits.topk(count).indices.tolist()))


def by_precision(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs by precision, each group in the order of seeds."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.precision, []).append(run)
    return groups


def print_table(runs: list[Run]) -> None:
    """Print held-out metrics, means over seeds, and training time as a ratio to FP32's."""
    groups = by_precision(runs)
    seconds = {precision: statistics.fmean(r.seconds for r in group) for precision, group in groups.items()}
    print(f"\n{'held out':9}{'loss':>9}{'AUC':>9}{'NE':>9}{f'HR@{TOP_K}':>9}{'time':>15}")
    for precision, group in groups.items():
        loss, auc, ne, hit_rate = (statistics.fmean(getattr(r.test, f.name) for r in group) for f in fields(Metrics))
        ratio = f"{seconds[precision] / seconds['fp32']:.2f} x fp32" if "fp32" in seconds else "-"
        print(f"{precision:9}{loss:9.4f}{auc:9.4f}{ne:9.4f}{hit_rate:9.4f}{ratio:>15}")


def neutrality(runs: list[Run]) -> dict[str, object]:
    """Compare MXFP8 with BF16 in test NE, seed by seed, against BF16's spread between seeds.

    Neutral: the mean |difference| is no larger than the spread (maximum - minimum).
    """
    ne = {precision: [r.test.ne for r in group] for precision, group in by_precision(runs).items()}
    differences = [a - b for a, b in zip(ne["mxfp8"], ne["bf16"], strict=True)]
    spread = max(ne["bf16"]) - min(ne["bf16"])
    return {
        "bf16_spread": spread,
        "bf16_std": statistics.stdev(ne["bf16"]),
        "mxfp8_minus_bf16": differences,
        "is_neutral": statistics.fmean(map(abs, differences)) <= spread,
    }


def print_neutrality(report: dict[str, object]) -> None:
    """Print what `neutrality` found."""
    differences = ", ".join(f"{difference:+.4f}" for difference in report["mxfp8_minus_bf16"])
    print(f"\nbf16 NE between seeds: max - min {report['bf16_spread']:.4f}, std {report['bf16_std']:.4f}")
    print(f"mxfp8 - bf16 NE, seed by seed: {differences}")
    verdict = "within" if report["is_neutral"] else "NOT within"
    print(f"mean |mxfp8 - bf16| is {verdict} bf16's spread between seeds")


def draw_curves(runs: list[Run], path: Path) -> None:
    """Draw training loss by step and validation NE by epoch, one colour a precision."""
    figure, (loss_axes, ne_axes) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for index, (precision, group) in enumerate(by_precision(runs).items()):
        for run in group:
            style = {"color": f"C{index}", "alpha": 0.8, "label": precision if run is group[0] else None}
            loss_axes.plot(run.losses, **style)
            ne_axes.plot(range(1, len(run.validation_ne) + 1), run.validation_ne, marker="o", **style)
    loss_axes.set(xlabel="step", ylabel="training loss (running mean)", title="MovieLens-100K, next item")
    ne_axes.set(xlabel="epoch", ylabel="validation NE", title="normalised entropy, held-out")
    ne_axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"{path}: curves")


def append_results(path: Path, runs: list[Run], plan: Plan, report: dict[str, object] | None) -> None:
    """Append one JSON line: the plan, every run's test metrics and validation NE, and the comparison of seeds."""
    record = {
        "example": "train_movielens",
        "torch": torch.__version__,
        "pma": pma.__version__,
        "plan": asdict(plan),
        "runs": [
            {"precision": r.precision, "seed": r.seed, "test": asdict(r.test), "validation_ne": r.validation_ne}
            for r in runs
        ],
        "neutrality": report,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=_positive, default=6, help="passes in which every user gives 16 interactions")
    parser.add_argument("--batch-size", type=_positive, default=128, help="segments in a training batch")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights, batches and negatives")
    parser.add_argument("--seeds", type=_positive, default=1, help="train this many seeds, from --seed on")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--no-compile", action="store_true", help="run the dense part without torch.compile")
    parser.add_argument("--quick", action="store_true", help="64 users, one epoch of 8 steps, whatever the other flags")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="for movielens.png and movielens.pt")
    parser.add_argument("--results", type=Path, help="append one JSON line to this file")
    return parser.parse_args()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return int(text)


def main() -> None:
    """Train every precision on every seed, then report."""
    arguments = parse_arguments()
    is_compiled = not arguments.no_compile
    plan = Plan(arguments.epochs, arguments.batch_size, per_user=16, is_compiled=is_compiled)
    if arguments.quick:
        plan = Plan(epochs=1, batch_size=32, per_user=4, is_compiled=is_compiled)
    torch.set_num_threads(1)  # the tensors are small, and no sum depends on the number of cores
    task = make_task(max_users=64 if arguments.quick else None)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)

    runs = []
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        runs += [train(task, precision, seed, plan) for precision in dict.fromkeys(arguments.precisions)]
    print_table(runs)
    report = None
    if arguments.seeds > 1 and {"mxfp8", "bf16"} <= set(arguments.precisions):
        report = neutrality(runs)
        print_neutrality(report)
    check_checkpoint(task, runs[0], arguments.output_dir / "movielens.pt", is_compiled)
    draw_curves(runs, arguments.output_dir / "movielens.png")
    print_recommendations(task, runs[0])
    if arguments.results is not None:
        append_results(arguments.results, runs, plan, report)


if __name__ == "__main__":
    main()
