rule fetch:
    output:
        "results/embedded/{source}.json",
    log:
        "results/logs/fetch/{source}.log",
    retries: 1
    conda:
        "../../environment.yml"
    resources:
        mem_mb=2000,
        runtime=60,
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
    threads: 2
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        preset=PRESET.name,
    shell:
        "attngeo pack {wildcards.dataset} --preset {params.preset} --workers {threads} > {log} 2>&1"
