rule variational:
    input:
        ancient(TRACKING),
        code=stamp("variational"),
    output:
        f"{RESULTS}/analyses/variational.json",
    log:
        f"{LOGS}/variational.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze variational --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"


rule trajectories:
    input:
        walked_inputs,
        ancient(TRACKING),
        code=stamp("trajectories/{model}"),
    output:
        f"{RESULTS}/analyses/trajectories/{{model}}.json",
    log:
        f"{LOGS}/trajectories/{{model}}.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze variational {wildcards.model} --preset {params.preset}"
        " --stamp {input.code} --threads {threads} > {log} 2>&1"


rule trajectories_runs:
    input:
        trained_inputs(PRESET.runs_that_feed("fig17")),
        ancient(TRACKING),
        code=stamp("trajectories_runs"),
    output:
        f"{RESULTS}/analyses/trajectories_runs.json",
    log:
        f"{LOGS}/trajectories_runs.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze variational --runs --preset {params.preset} --stamp {input.code}"
        " --threads {threads} > {log} 2>&1"
