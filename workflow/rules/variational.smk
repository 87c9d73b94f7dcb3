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
        gpu=asked("analyze").gpu,
        mem_mb=asked("analyze").mem_mb,
        runtime=asked("analyze").runtime,
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze variational --preset {params.preset} --stamp {input.code} > {log} 2>&1"
