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
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze injectivity --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"
