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
