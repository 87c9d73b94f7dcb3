rule fiber_rates:
    input:
        ancient(TRACKING),
        fiber_images(),
        code=stamp("fiber_rates/{task}"),
    output:
        f"{RESULTS}/analyses/fiber_rates/{{task}}.json",
    log:
        f"{LOGS}/fiber_rates/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: asked("train").threads
    resources:
        **needs("train", gpu=0),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze fiber-rates {wildcards.task} --preset {params.preset} --stamp {input.code}"
        " --threads {threads} > {log} 2>&1"


rule fiber_task:
    input:
        ancient(TRACKING),
        fiber_images(),
        fiber_rates_of,
        code=stamp("fiber_tasks/{name}"),
    output:
        f"{RESULTS}/analyses/fiber_tasks/{{name}}.json",
        weights=directory(f"{RESULTS}/fiber_models/{{name}}"),
    log:
        f"{LOGS}/fiber_tasks/{{name}}.log",
    conda:
        "../../environment.yml"
    threads: asked("train").threads
    resources:
        **needs("train", gpu=0),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze fiber-task {wildcards.name} --preset {params.preset} --stamp {input.code}"
        " --threads {threads} > {log} 2>&1"


rule rank_collapse:
    input:
        ancient(TRACKING),
        code=stamp("rank_collapse/s{seed}"),
    output:
        f"{RESULTS}/analyses/rank_collapse/s{{seed}}.json",
    log:
        f"{LOGS}/rank_collapse/s{{seed}}.log",
    conda:
        "../../environment.yml"
    threads: asked("train").threads
    resources:
        **needs("train", gpu=0),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze rank-collapse {wildcards.seed} --preset {params.preset} --stamp {input.code}"
        " --threads {threads} > {log} 2>&1"


rule fiber_bundle:
    input:
        ancient(TRACKING),
        [f"{RESULTS}/{path}" for path in fiber_task_files(PRESET)],
        [f"{RESULTS}/{path}" for path in rank_collapse_files(PRESET)],
        code=stamp("fiber_bundle"),
    output:
        f"{RESULTS}/analyses/fiber_bundle.json",
        f"{RESULTS}/analyses/predictions.json",
    log:
        f"{LOGS}/fiber_bundle.log",
    conda:
        "../../environment.yml"
    threads: asked("analyze").threads
    resources:
        **needs("analyze"),
    params:
        preset=PRESET.name,
    shell:
        "attngeo analyze fiber-bundle --preset {params.preset} --stamp {input.code}"
        " --threads {threads} > {log} 2>&1"
