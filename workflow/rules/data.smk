rule fetch:
    output:
        "results/embedded/{source}.json",
    log:
        "results/logs/fetch/{source}.log",
    retries: 1
    conda:
        "../../environment.yml"
    # A package is converted in memory.
    resources:
        **needs("draw", mem_mb=2000, runtime=240),
    shell:
        "attngeo fetch {wildcards.source} --report {output} > {log} 2>&1"


rule pack:
    input:
        lambda wildcards: embedded_input(
            wildcards.dataset, PRESET.datasets[wildcards.dataset].source
        ),
        code=stamp("data/{dataset}"),
    output:
        f"{RESULTS}/data/{{dataset}}/manifest.json",
    log:
        f"{LOGS}/pack/{{dataset}}.log",
    conda:
        "../../environment.yml"
    threads: asked("prepare").threads
    resources:
        **needs("prepare"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo pack {wildcards.dataset} --preset {params.preset} --workers {threads} > {log} 2>&1"
