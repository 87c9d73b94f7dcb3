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
