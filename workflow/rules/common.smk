import json
import os
import re
import subprocess
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from attngeo.config import load_preset
from attngeo.errors import UserError
from attngeo.jobs.planned import refuse_to_change
from attngeo.jobs.stamps import FIBER_IMAGES, write_stamps
from attngeo.paper.targets import (
    PAGES,
    TARGETS,
    fiber_task_files,
    rank_collapse_files,
)
from attngeo.tracking.journal import LATER, has_unsent

try:
    OVERRIDES = {key: value for key, value in config.items() if key != "preset"}
    PRESET = load_preset(ROOT, config.get("preset", "demo"), OVERRIDES)
    # The parses of single jobs, on a cluster, and of one that removes a lock plan nothing.
    if workflow.is_main_process and "--unlock" not in sys.argv:
        refuse_to_change(PRESET)
        write_stamps(PRESET)
except (UserError, SyntaxError, ValueError, OSError) as error:
    raise WorkflowError(str(error))

# Jobs run the commands of this environment and the code of this tree, whatever else is installed, and read the same
# overrides as this parse; `envvars` takes them to the nodes of a cluster.
for name, first in (
    ("PATH", [Path(sys.executable).parent]),
    ("PYTHONPATH", [ROOT / "src", ROOT / "cuda_ext"]),
):
    os.environ[name] = os.pathsep.join(
        filter(None, [*map(str, first), os.environ.get(name)])
    )
os.environ.update(
    {LATER: "1"},
    ATTNGEO_OVERRIDES=json.dumps(OVERRIDES),
    MLFLOW_DISABLE_TELEMETRY="true",
)


envvars:
    "ATTNGEO_OVERRIDES",
    LATER,
    "PYTHONPATH",


# Jobs end when Snakemake does, even when it is killed.
shell.executable(str(ROOT / "workflow" / "bin" / "with-parent.sh"))

RESULTS = f"results/{PRESET.name}"
LOGS = f"{RESULTS}/logs"
EXTENSION = "results/extension.json"
TRACKING = "results/tracking.json"

# What is read of a decoder of our own.
DECODER_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "source.json",
)

# Names in paper_figures/ and the file below results/<preset>/ that each is a copy of.
SHOWN = {
    Path(path).name: path for target in TARGETS.values() for path in target.outputs
} | {"licences.md": "licences.md"}
# What writes a page, where its command is not that of a figure or a table.
PAGE_COMMANDS = {"claims": "ledger", "index": "gallery", "macros": "macros"}


def stamp(name):
    """Digest stamp of the code, values and versions behind a job."""
    return f"{RESULTS}/.code/{name}.txt"


def asked(stage):
    """What one job of a stage asks for, as the preset's config.yaml sets it."""
    return getattr(PRESET.resources, stage)


def in_processes(count):
    """The command line, started once or by torchrun in several processes that work together."""
    several = f"torchrun --standalone --nproc_per_node {count} -m attngeo"
    return "attngeo" if count == 1 else several


def needs(stage, **instead):
    """The resources of a rule, the stage's but for those given: GPUs, and memory and minutes that grow with every
    attempt, since the last one may have ended for want of them."""
    resources = asked(stage).model_copy(update=instead)

    def growing(amount):
        return lambda wildcards, attempt: attempt * amount

    return {
        "gpu": resources.gpu,
        "mem_mb": growing(resources.mem_mb),
        "runtime": growing(resources.runtime),
    }


def everything():
    """The compiled operators, and all that this preset puts into paper_figures/."""
    return [
        EXTENSION,
        "paper_figures/PRESET",
        *(
            f"paper_figures/{name}.{ending}"
            for name in PRESET.figures
            for ending in ("pdf", "png")
        ),
        *(
            f"paper_figures/{name}.{ending}"
            for name in PRESET.tables
            for ending in ("tex", "md", "csv")
        ),
        *(f"paper_figures/{path}" for page in PAGES.values() for path in page.outputs),
        "paper_figures/licences.md",
    ]


def embedded_input(name, source):
    """The fetched package behind a name whose source is 'embedded'."""
    return [f"results/embedded/{name}.json"] if source == "embedded" else []


def fiber_images():
    """The images of the Fiber Bundle Transformer's tasks, where the preset has one that needs them."""
    tasks = PRESET.fiber_bundle.tasks if PRESET.fiber_bundle else ()
    return [f"results/embedded/{FIBER_IMAGES}.json"] if FIBER_IMAGES in tasks else []


def fiber_rates_of(wildcards):
    """The rates tried on a task, where there are several; a later trial must not train everything again."""
    task = PRESET.fiber_task_run(wildcards.name).task
    tried = task in PRESET.fiber_rate_tasks
    return [ancient(f"{RESULTS}/analyses/fiber_rates/{task}.json")] if tried else []


def walked_inputs(wildcards):
    """The model, and the images that a vision model looks at."""
    model = PRESET.analysed_models[wildcards.model]
    if model in PRESET.decoder_models:
        return [f"{model.source}/{name}" for name in DECODER_FILES]
    images = ["results/embedded/textile.json"] if model in PRESET.vision_models else []
    return embedded_input(model.id, model.source) + images


def trained_inputs(runs):
    """What makes the models of finished runs again, and the images of their data sets."""
    files = [
        f"{RESULTS}/runs/{run.run_id}/{name}"
        for run in runs
        for name in ("final.json", "weights.safetensors")
    ]
    images = {f"{RESULTS}/data/{run.dataset}/manifest.json" for run in runs}
    return files + sorted(images)


def photographed_inputs(model_id):
    """A pretrained vision model of the preset, and the images that it looks at."""
    source = getattr(PRESET.analysed_models.get(model_id), "source", "")
    return ["results/embedded/textile.json", *embedded_input(model_id, source)]


def target_inputs(target):
    """Files that a target is made from; one that this preset does not make is refused where it is asked for."""
    if target.name in (*PRESET.figures, *PRESET.tables, *PAGES):
        return [f"{RESULTS}/{path}" for path in target.inputs(PRESET)]
    folder = f"config/{PRESET.name}"
    if target.inputs(PRESET):
        remedy = f"add it to the {target.kind}s in {folder}/config.yaml"
    else:
        remedy = f"let runs of {folder}/runs.tsv feed it, or add what it shows to {folder}/config.yaml"
    raise WorkflowError(f"preset {PRESET.name} does not make {target.name}: {remedy}")


def target_outputs(target):
    """Files of a target; the one that a reader looks at goes into `snakemake --report` with its caption."""
    looked_at = {"figure": ".png", "page": ".html"}.get(target.kind, ".csv")
    outputs = []
    for path in target.outputs:
        file = f"{RESULTS}/{path}"
        # The report has a gallery of its own; ours shows the pictures beside it.
        if path.endswith(looked_at) and target.name != "index":
            caption = f"../../{target.caption_file}"
            labels = {target.kind: target.title}
            file = report(
                file, caption=caption, category=f"{target.kind}s", labels=labels
            )
        outputs.append(file)
    return outputs


def other_presets_files():
    """What another preset left in paper_figures/ and this one does not make."""
    return sorted({f"paper_figures/{name}" for name in SHOWN} - set(everything()))


def track():
    """Send what finished jobs recorded to MLflow; what cannot be sent is said and stays for the next time."""
    if not has_unsent(ROOT, PRESET.name):
        return
    log = Path(LOGS, "track_sync.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        sent = subprocess.run(
            ["attngeo", "track", "sync", PRESET.name], stdout=stream, stderr=stream
        )
    if sent.returncode:
        print(
            f"MLflow lacks some of this run, `attngeo track sync {PRESET.name}` sends it; why: {log}",
            file=sys.stderr,
        )


onsuccess:
    track()


onerror:
    track()
