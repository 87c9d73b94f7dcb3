rule injectivity:
    input:
        "results/embedded/textile.json",
        embedded_input(
            PRESET.injectivity.model,
            getattr(
                PRESET.analysed_models.get(PRESET.injectivity.model), "source", ""
            ),
        ),
        ancient(TRACKING),
        code=stamp("injectivity"),
    output:
        f"{RESULTS}/analyses/injectivity.json",
    log:
        f"{LOGS}/injectivity.log",
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
        "attngeo analyze injectivity --preset {params.preset} --stamp {input.code} > {log} 2>&1"
