def target_outputs(target):
    """Files of a target; the one that a reader looks at goes into `snakemake --report` with its caption."""
    looked_at = {"figure": ".png", "table": ".csv", "page": ".html"}[target.kind]
    outputs = []
    for path in target.outputs:
        file = f"{RESULTS}/{path}"
        if path.endswith(looked_at):
            caption = f"../../{target.caption_file}"
            labels = {target.kind: target.title}
            file = report(
                file, caption=caption, category=f"{target.kind}s", labels=labels
            )
        outputs.append(file)
    return outputs


for target in [TARGETS[name] for name in (*PRESET.figures, *PRESET.tables, *PAGES)]:

    rule:
        name:
            target.name
        input:
            [f"{RESULTS}/{path}" for path in target.inputs(PRESET)],
            ancient(TRACKING),
            code=stamp(f"paper/{target.name}"),
        output:
            target_outputs(target),
        log:
            f"{LOGS}/{target.name}.log",
        conda:
            "../../environment.yml"
        resources:
            mem_mb=asked("draw").mem_mb,
            runtime=asked("draw").runtime,
        params:
            command=(
                "ledger" if target.kind == "page" else f"{target.kind} {target.name}"
            ),
        shell:
            "attngeo {params.command} --preset {PRESET.name} --stamp {input.code} > {log} 2>&1"


localrules:
    show,
    show_preset,


def shown(wildcards):
    """The file of the active preset that a file under paper_figures/ is a copy of."""
    name = f"{wildcards.name}.{wildcards.ending}"
    return next(
        f"{RESULTS}/{path}"
        for path in TARGETS[wildcards.name].outputs
        if path.endswith(name)
    )


rule show:
    input:
        shown,
        "results/.code/preset.txt",
    output:
        "paper_figures/{name}.{ending}",
    log:
        "results/logs/show/{name}.{ending}.log",
    wildcard_constraints:
        name="|".join(TARGETS),
        ending="pdf|png|csv|md|tex|html",
    conda:
        "../../environment.yml"
    shell:
        "cp {input[0]} {output} 2> {log}"


rule show_preset:
    input:
        "results/.code/preset.txt",
    output:
        "paper_figures/PRESET",
    log:
        "results/logs/show/PRESET.log",
    conda:
        "../../environment.yml"
    shell:
        "cp {input} {output} 2> {log}"
