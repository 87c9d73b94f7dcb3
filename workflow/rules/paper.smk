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
            command=PAGE_COMMANDS.get(target.name, f"{target.kind} {target.name}"),
        shell:
            "attngeo {params.command} --preset {params.preset} --stamp {input.code} > {log} 2>&1"


rule licences:
    input:
        stamp("licences"),
    output:
        f"{RESULTS}/licences.md",
    log:
        f"{LOGS}/licences.log",
    conda:
        "../../environment.yml"
    resources:
        **needs("draw"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo licences --preset {params.preset} --stamp {input} > {log} 2>&1"


localrules:
    show,
    show_page,
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
        file="|".join(re.escape(name) for name in SHOWN if not name.endswith(".html")),
    conda:
        "../../environment.yml"
    resources:
        **needs("draw"),
    shell:
        "cp {input.copied} {output} 2> {log}"


# paper_figures/ is flat, and one level nearer to the project's files.
rule show_page:
    input:
        copied=f"{RESULTS}/{{page}}.html",
        preset="results/.code/preset.txt",
    output:
        "paper_figures/{page}.html",
    log:
        "results/logs/show/{page}.log",
    wildcard_constraints:
        page="claims|index",
    conda:
        "../../environment.yml"
    resources:
        **needs("draw"),
    shell:
        "sed -E -e 's#(src|href)=\"(figures|tables)/#\\1=\"#g' -e 's#=\"\.\./\.\./#=\"../#g'"
        " {input.copied} > {output} 2> {log}"


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
