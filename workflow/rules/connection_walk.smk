def walked_inputs(wildcards):
    """The model, and the images that a vision model looks at."""
    model = PRESET.analysed_models[wildcards.model]
    images = ["results/embedded/textile.json"] if model in PRESET.vision_models else []
    return embedded_input(model.id, model.source) + images


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
        gpu=asked("analyze").gpu,
        mem_mb=asked("analyze").mem_mb,
        runtime=asked("analyze").runtime,
    shell:
        "attngeo analyze connection-walk {wildcards.model} --preset {PRESET.name}"
        " --stamp {input.code} > {log} 2>&1"
