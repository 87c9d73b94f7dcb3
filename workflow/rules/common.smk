import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(workflow.basedir)
sys.path.insert(0, str(ROOT / "src"))

from attngeo.config import load_preset, write_schemas
from attngeo.errors import UserError
from attngeo.jobs.stamps import write_stamps
from attngeo.paper.targets import PAGES, TARGETS

try:
    OVERRIDES = {key: value for key, value in config.items() if key != "preset"}
    PRESET = load_preset(ROOT, config.get("preset", "demo"), OVERRIDES)
    write_stamps(PRESET)
    write_schemas(ROOT / "workflow" / "schemas")
except (UserError, SyntaxError, OSError) as error:
    raise WorkflowError(str(error))

# Jobs run the commands of this environment and the code of this tree, whatever else is installed.
os.environ["PATH"] = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])
)
# They read the same overrides, which also travel to the nodes of a cluster.
os.environ["ATTNGEO_OVERRIDES"] = json.dumps(OVERRIDES)
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

# Jobs end when Snakemake does, even when it is killed.
shell.executable(str(ROOT / "workflow" / "bin" / "with-parent.sh"))

RESULTS = f"results/{PRESET.name}"
LOGS = f"{RESULTS}/logs"
EXTENSION = "results/extension.json"
TRACKING = "results/tracking.json"


def stamp(name):
    """Digest stamp of the code, values and versions behind a job."""
    return f"{RESULTS}/.code/{name}.txt"


def asked(stage):
    """Resources of a stage as the preset's config.yaml sets them."""
    return getattr(PRESET.resources, stage)


def paper_files():
    """Everything under paper_figures/ that this preset makes."""
    return [
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
        "paper_figures/claims.html",
    ]
