rule connection_walk:
    input:
        walked_inputs,
        ancient(TRACKING),
        code=stamp("connection_walk/{model}"),
    output:
        f"{RESULTS}/analyses/connection_walk/{{model}}.json",
    log:
        f"{LOGS}/connection_walk/{{model}}.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze connection-walk {wildcards.model} --preset {params.preset}"
        " --stamp {input.code} --threads {threads} > {log} 2>&1"


rule connection_walk_runs:
    input:
        trained_inputs(PRESET.runs_that_feed("fig10")),
        ancient(TRACKING),
        code=stamp("connection_walk_runs"),
    output:
        f"{RESULTS}/analyses/connection_walk_runs.json",
    log:
        f"{LOGS}/connection_walk_runs.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze connection-walk --runs --preset {params.preset}"
        " --stamp {input.code} --threads {threads} > {log} 2>&1"
