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


def embedded_input(name, source):
    """The fetched package behind a name whose source is 'embedded'."""
    return [f"results/embedded/{name}.json"] if source == "embedded" else []


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
    shell:
        "attngeo pack {wildcards.dataset} --preset {PRESET.name} --workers {threads} > {log} 2>&1"
