# Rebuilds every figure, table and verdict of a preset:  snakemake --cores 8 all
from snakemake.utils import min_version

min_version("9.27")


workdir: workflow.basedir


include: "workflow/rules/common.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/decoders.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/connection_walk.smk"
include: "workflow/rules/variational.smk"
include: "workflow/rules/fiber_bundle.smk"
include: "workflow/rules/benchmark.smk"
include: "workflow/rules/paper.smk"


rule all:
    default_target: True
    input:
        everything(),
