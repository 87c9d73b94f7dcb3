for target in TARGETS.values():

    rule:
        name:
            target.name
        input:
            lambda wildcards, target=target: target_inputs(target),
            ancient(TRACKING),
            code=stamp(f"paper/{target.name}"),
        output:
            target_outputs(target),
        log:
            f"{LOGS}/{target.name}.log",
        conda:
            "../../environment.yml"
        threads: asked("draw").threads
        resources:
            **needs("draw"),
        params:
            preset=PRESET.name,
            command=(
                "ledger" if target.kind == "page" else f"{target.kind} {target.name}"
            ),
        shell:
            "attngeo {params.command} --preset {params.preset} --stamp {input.code} > {log} 2>&1"


localrules:
    show,
    show_preset,


rule show:
    input:
        copied=lambda wildcards: f"{RESULTS}/{SHOWN[wildcards.file]}",
        preset="results/.code/preset.txt",
    output:
        "paper_figures/{file}",
    log:
        "results/logs/show/{file}.log",
    wildcard_constraints:
        file="|".join(map(re.escape, SHOWN)),
    conda:
        "../../environment.yml"
    resources:
        **needs("draw"),
    shell:
        "cp {input.copied} {output} 2> {log}"


rule show_preset:
    input:
        "results/.code/preset.txt",
    output:
        "paper_figures/PRESET",
    log:
        "results/logs/show/PRESET.log",
    conda:
        "../../environment.yml"
    resources:
        **needs("draw"),
    params:
        preset=PRESET.name,
        others=other_presets_files(),
    shell:
        "(rm -f {params.others} && echo {params.preset} > {output}) 2> {log}"
