"""Table tuning: accuracy on held-out training images by attention kind and peak learning rate, and the rate chosen."""

from collections.abc import Sequence
from pathlib import Path

from attngeo.errors import UserError
from attngeo.paper.render import Tabulated
from attngeo.paper.results import (
    accuracies,
    listed,
    made_from,
    non_finite_sentence,
    preset_name,
    read_finals,
    require_inputs,
    span,
    summarise,
)

EXPERIMENT = ["dataset", "recipe", "model", "attention"]  # what a rate is chosen for


def tabulate(inputs: Sequence[Path]) -> Tabulated:
    """Tabulate final.json of the runs, a row a rate of each experiment."""
    import pandas as pd

    require_inputs(inputs, "tuning", "run")
    finals = read_finals(inputs)
    finals["rate"] = [float(values["lr"]) for values in finals["recipe_values"]]
    case = [*EXPERIMENT, "rate"]
    twins = finals[finals.duplicated([*case, "seed"], keep=False)]
    if len(twins):
        raise UserError(
            f"tuning: runs {listed(twins['run_id'])} share data set, recipe, model, attention, rate and seed",
            "let only one of them feed tuning",
        )
    finals["accuracy"] = accuracies(finals)
    rates = summarise(finals, case, "accuracy")
    rates["images"] = finals.groupby(case)["n_eval"].min().to_numpy()
    tried = rates.groupby(EXPERIMENT)["rate"]
    # Rates ascend, so that of equals the lower one is chosen; one that diverged (NaN) never is.
    best = rates.dropna(subset="mean").groupby(EXPERIMENT)["mean"].idxmax()
    chosen = pd.Series("", index=rates.index)
    chosen.loc[best.to_numpy()] = "yes"
    at_the_end = (rates["rate"] == tried.transform("min")) | (rates["rate"] == tried.transform("max"))
    chosen[(chosen == "yes") & at_the_end] = "yes, at an end of the range"
    share = rates["mean"] / 100
    table = pd.DataFrame(
        {
            "data set": rates["dataset"],
            "recipe": rates["recipe"],
            "model": rates["model"],
            "attention": rates["attention"],
            "peak rate": rates["rate"],
            "top-1 (%)": rates["mean"],
            "standard error": 100 * (share * (1 - share) / rates["images"]) ** 0.5,
            "below the best": rates.groupby(EXPERIMENT)["mean"].transform("max") - rates["mean"],
            "n": rates["n"],
            "images": rates["images"],
            "chosen": chosen,
        }
    )
    caption = (
        "The peak learning rate of each attention kind, chosen on training images that the runs were not trained on "
        "(hold_out in config.yaml); the validation images of the sets were not read. Rule, fixed before the runs: the "
        "rate with the highest held-out top-1 accuracy, of equals the lower one; where it is the lowest or the highest "
        "one tried, one beyond may be better. top-1: mean over "
        f"n = {span(int(n) for n in rates['n'])} seeds. standard error (points): binomial, over the held-out images, "
        "which all rates of a data set share; it holds nothing of the spread between seeds, so that a rate hardly "
        "below the best may be as good. All numbers are measured by this project. "
        f"{made_from(preset_name(inputs), finals)}"
    ) + non_finite_sentence(int(rates["non_finite"].sum()))
    return Tabulated(
        table,
        caption,
        "tuning",
        formats={"peak rate": "g", "top-1 (%)": ".1f", "standard error": ".1f", "below the best": ".1f"},
        long=True,
    )
