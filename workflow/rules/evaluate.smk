rule injectivity:
    input:
        photographed_inputs(PRESET.injectivity.model),
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


rule attention_distance:
    input:
        photographed_inputs(PRESET.attention_distance.model),
        trained_inputs(PRESET.runs_that_feed("fig1")),
        ancient(TRACKING),
        code=stamp("attention_distance"),
    output:
        f"{RESULTS}/analyses/attention_distance.json",
    log:
        f"{LOGS}/attention_distance.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze attention-distance --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"


rule attention_maps:
    input:
        trained_inputs(PRESET.runs_that_feed("fig8")),
        ancient(TRACKING),
        code=stamp("attention_maps"),
    output:
        records=f"{RESULTS}/analyses/attention_maps.json",
        arrays=f"{RESULTS}/analyses/attention_maps.npz",
    log:
        f"{LOGS}/attention_maps.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze attention-maps --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"


rule score_rank:
    input:
        ancient(TRACKING),
        code=stamp("score_rank"),
    output:
        f"{RESULTS}/analyses/score_rank.json",
    log:
        f"{LOGS}/score_rank.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze score-rank --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"
