"""Job: draw a figure, make a table or write a page of a preset."""

import importlib
import time
from pathlib import Path

from attngeo.config import Preset
from attngeo.errors import UserError
from attngeo.paper import claims
from attngeo.paper.claims import Verdict
from attngeo.paper.gallery import EXPERIMENT
from attngeo.paper.targets import PAGES, TARGETS, made_from
from attngeo.tracking.mlflow_run import log_job


def judge(preset: Preset) -> list[Verdict]:
    """The verdict on every claim, from the files that this preset makes."""
    inputs = [preset.results / path for path in PAGES["claims"].inputs(preset)]
    return claims.evaluate(preset.name, preset.results, inputs)


def draw(preset: Preset, name: str, code_digest: str) -> list[Path]:
    """Make one target from the files under results/<preset>; return the files written.

    Raises:
        UserError: a figure or a table that the gallery or the numbers for prose are made of is not there.
    """
    started = time.monotonic()
    target = TARGETS[name]
    inputs = [preset.results / path for path in target.inputs(preset)]
    outputs = [preset.results / path for path in target.outputs]
    if target in (PAGES["index"], PAGES["macros"]) and (missing := [path for path in inputs if not path.is_file()]):
        raise UserError(
            f"{missing[0]} does not exist ({len(missing)} of {len(inputs)} files that {target.title!r} is made of)",
            f"make them first: snakemake --cores 2 --config preset={preset.name} -- all",
        )
    module = importlib.import_module(target.module)
    if target.kind == "page":
        module.write_page(preset.name, preset.results, outputs[0], inputs=inputs, made_from=made_from(preset))
    elif target.kind == "prose":
        module.write_macros(preset.name, inputs, *outputs)
    else:
        from attngeo.paper import render

        stem = preset.results / f"{target.kind}s" / name
        if target.kind == "figure":
            render.write_figure(module.draw(inputs), stem)
        else:
            render.write_table(module.tabulate(inputs), stem)
    log_job(
        preset.root,
        EXPERIMENT,
        name,
        params={"target": name, "preset": preset.name, "inputs": len(inputs)},
        metrics={"wall_s": time.monotonic() - started},
        artifacts=outputs,
        tags={"attngeo.kind": target.kind, "attngeo.preset": preset.name, "attngeo.code_digest": code_digest},
    )
    return outputs
