"""Make reports/example and the measured part of the README: the reference pair, on the shipped held-out text.

Example: python reports/example.py            (most of it eight dictionaries, seven to eight CPU minutes each)
         python reports/example.py --judge-url http://127.0.0.1:8000/v1      (also asks a model that is served there)
"""

import argparse
import json
from pathlib import Path

import carried
import pandas as pd
import v1

from analyses import ablate, suite
from satlens.reading import Reading
from satlens.reference import FOLDER, MODELS
from satlens.report import assemble
from satlens.run import FinishedRun, open_run

ROOT = Path(__file__).parents[1]
OUT = ROOT / "reports" / "example"
BEGIN, BEGIN_V1, BEGIN_CARRIED, END = (
    "<!-- measured: reports/example.py -->",
    "<!-- measured: reports/v1.py -->",
    "<!-- measured: reports/carried.py -->",
    "<!-- /measured -->",
)


def main() -> None:
    """Measure layers on much text and single heads on less, then write page, README block and numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=80_000, help="text tokens for layers, gates and lens")
    parser.add_argument("--head-tokens", type=int, default=40_000, help="text tokens for single heads")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "example")
    parser.add_argument(
        "--reuse", action="store_true", help="write from the newest runs there, measure nothing"
    )
    parser.add_argument("--check-tokens", type=int, default=20_000, help="text tokens for checks of the flow")
    parser.add_argument(
        "--carried-tokens", type=int, default=8_000, help="text tokens for changes of the carried direction"
    )
    parser.add_argument(
        "--judge-url", help="an OpenAI-compatible endpoint whose judge is calibrated and asked too"
    )
    parser.add_argument(
        "--judge-limit", type=int, default=60, help="latents of each dictionary that it is asked about"
    )
    given = parser.parse_args()
    if not given.reuse:
        measure(given.tokens, given.head_tokens, given.runs)
        v1.describe(given.runs, given.check_tokens)
        carried.describe(given.runs, given.carried_tokens)
    if given.judge_url:
        v1.ask(given.runs, given.judge_url, given.judge_limit)
    runs, of_v1 = newest(given.runs), v1.newest(given.runs)
    of_carried = carried.newest(given.runs)
    every = [run.path for run in (*runs.values(), *v1.shown(of_v1), *of_carried)]
    assemble(every, OUT, static=True, title="satlens: the reference pair")
    blocks = {
        BEGIN: measured(runs, runs["heads"]),
        BEGIN_V1: v1.block(of_v1),
        BEGIN_CARRIED: carried.block(of_carried),
    }
    (OUT / "numbers.md").write_text("\n".join(blocks.values()), encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    for begin, block in blocks.items():
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{block}\n{END}{rest.split(END, 1)[1]}"
    readme.write_text(text, encoding="utf-8")


def measure(tokens: int, head_tokens: int, runs: Path) -> None:
    """Everything but single heads on ``tokens``; single heads, which are many, on ``head_tokens``."""
    scopes: tuple[ablate.Scope, ...] = ("layer", "upward", "downward")
    reading = Reading(tokens=tokens, runs=runs)
    suite.run(suite.Config(scopes=scopes, sae_tokens=0, reading=reading, out=runs / "page"))
    fewer = Reading(tokens=head_tokens, runs=runs)
    ablate.run(ablate.Config(kinds=("zero",), scopes=("head",), reading=fewer))


def newest(folder: Path) -> dict[str, FinishedRun]:
    """The newest finished run of each kind, in reading order; `heads` is the ablation of single heads."""
    found: dict[str, FinishedRun] = {}
    for path in sorted(folder.glob("*-2*"), key=lambda path: path.name.split("-")[-3:-1]):
        if (path / "manifest.json").exists():
            run = open_run(path)
            heads = "head" in run.manifest.config.get("scopes", ())
            found["heads" if heads else run.manifest.verb] = run
    return {kind: found[kind] for kind in ("gates", "ablate", "heads", "lens", "doctor")}


def measured(runs: dict[str, FinishedRun], heads: FinishedRun) -> str:
    """The tables of the README, from the runs' own tables."""
    gates, ablation, lens = (runs[verb] for verb in ("gates", "ablate", "lens"))
    info, data = lens.manifest.summary, lens.manifest.data
    lines = [
        f"Text: {info['n_tokens']:,} scored predictions in {info['n_documents']} held-out documents "
        f"({data['text']}, rows of {data['window']}); brackets are 95 % intervals over documents.",
        "",
        "| model | perplexity |",
        "|---|---|",
    ]
    table = lens.tables["lens"]
    for row in table[table["layer"] == table["layer"].max()].itertuples():
        lines.append(f"| {row.model} | {interval(row.perplexity, row.low, row.high)} |")
    lines += ["", *layer_table(gates, ablation, lens), "", *sentences(ablation, lens, heads)]
    return "\n".join(lines) + "\n"


def layer_table(gates: FinishedRun, ablation: FinishedRun, lens: FinishedRun) -> list[str]:
    """One row a layer: the gate's mean and sparsity, what ablating it costs, and the lens difference."""
    profile = gates.tables["gate_profile"].set_index("layer")
    table = ablation.tables["ablation"].query("scope == 'layer'").set_index(["layer", "condition"])
    gap = lens.tables["lens_difference"].set_index("layer")
    lines = [
        "| layer | mean alpha | exactly 0 | delta PPL, zero | delta PPL, mean | "
        "lens: NLL against the Transformer |",
        "|---|---|---|---|---|---|",
    ]
    for layer in gap.index:
        cells = ["none: produces V1", "", "", ""]
        if layer in profile.index:
            gate = profile.loc[layer]
            cells = [
                interval(gate["mean"], gate["low"], gate["high"]),
                interval(100 * gate["zero_fraction"], 100 * gate["zero_low"], 100 * gate["zero_high"]) + " %",
            ]
            for kind in ("zero", "mean"):
                row = table.loc[(layer, kind)]
                cells.append(interval(row["delta_ppl"], row["delta_ppl_low"], row["delta_ppl_high"]))
        row = gap.loc[layer]
        lines.append(
            f"| {layer} | {' | '.join(cells)} | {interval(row['delta_nll'], row['low'], row['high'])} |"
        )
    return lines


def sentences(ablation: FinishedRun, lens: FinishedRun, heads: FinishedRun) -> list[str]:
    """What the tables say, in words made from their numbers."""
    table = ablation.tables["ablation"]
    everything = table.query("scope == 'upward' and layer == layer.min()").iloc[0]
    cross = lens.tables["crossover"].iloc[0]
    gap = lens.tables["lens_difference"].iloc[-1]
    single = heads.tables["ablation"].sort_values("delta_nll", ascending=False)
    harmless = int((single["delta_nll_low"] <= 0).sum())
    worst = single.iloc[0]
    zero = table.query("scope == 'layer' and condition == 'zero'")
    sure = zero[zero["delta_ppl_low"] > 0]["layer"].tolist()
    lines = [
        f"- Zeroing every gate at once costs {ppl(everything)} PPL.",
        f"- Layers whose zeroing surely hurts (interval above 0): {', '.join(map(str, sure)) or 'none'}.",
        f"- At the last layer SATFormer's NLL minus the Transformer's is "
        f"{interval(gap['delta_nll'], gap['low'], gap['high'])} nats per token.",
        crossing(cross),
        training_gap(),
        f"- Of {len(single)} single heads, {harmless} can be zeroed without a sure loss "
        f"({heads.manifest.summary['n_tokens']:,} predictions); the one that matters most is head "
        f"{int(worst['kv_head'])} of layer {int(worst['layer'])}: "
        f"{interval(worst['delta_nll'], worst['delta_nll_low'], worst['delta_nll_high'])} nats.",
    ]
    for name, better in (("mean", "zero"), ("head-mean", "mean"), ("resample", "head-mean")):
        lines.append(ladder(table, name, better))
    return lines


def training_gap() -> str:
    """How far the twin was behind while both were trained, from the logs that ship with them."""
    losses = []
    for folder in MODELS.values():
        lines = (FOLDER / folder / "training-log.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        losses.append({row["step"]: row["val_loss"] for row in rows if "val_loss" in row})
    steps = sorted(losses[0].keys() & losses[1].keys())
    third, last = steps[len(steps) // 3], steps[-1]
    gaps = [losses[1][step] - losses[0][step] for step in (third, last)]
    return (
        f"- On held-out windows of the training mix the Transformer was {gaps[0]:.2f} nats behind after "
        f"{third:,} steps of {last:,}, and is {gaps[1]:.2f} behind at the end: "
        f"the gap {'is still closing' if gaps[1] < gaps[0] else 'is not closing'}."
    )


def crossing(row: pd.Series) -> str:
    """Where SATFormer overtakes for good, or that it does not."""
    share = row["share_of_resamples_with_crossover"]
    if pd.isna(row["layer"]):
        return f"- SATFormer does not overtake the Transformer for good at any layer ({share:.0%} of resamples do)."
    where = f"layer {int(row['layer'])} [{int(row['low'])}, {int(row['high'])}]"
    return f"- By the logit lens SATFormer overtakes the Transformer for good at {where} ({share:.0%} of resamples)."


def ladder(table: pd.DataFrame, kind: str, below: str) -> str:
    """How much of the loss one rung of the ladder wins back, added over layers."""
    rows = table.query("scope == 'layer'").pivot(index="layer", columns="condition", values="delta_nll").sum()
    return (
        f"- Added over single layers, `{kind}` leaves {rows[kind]:.4f} nats of loss against "
        f"{rows[below]:.4f} for `{below}`."
    )


def ppl(row: pd.Series) -> str:
    """A delta PPL with its interval."""
    return interval(row["delta_ppl"], row["delta_ppl_low"], row["delta_ppl_high"])


def interval(value: float, low: float, high: float) -> str:
    """Three significant digits and the interval."""
    if pd.isna(low):
        return digits(value)
    return f"{digits(value)} [{digits(low)}, {digits(high)}]"


def digits(value: float) -> str:
    """Three significant digits, and never an exponent for a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
