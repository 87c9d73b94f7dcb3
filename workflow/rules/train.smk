rule train:
    input:
        lambda wildcards: f"{RESULTS}/data/{PRESET.run(wildcards.run_id).dataset}/manifest.json",
        ancient(TRACKING),
        code=stamp("runs/{run_id}"),
    output:
        metrics=f"{RESULTS}/runs/{{run_id}}/metrics.jsonl",
        final=f"{RESULTS}/runs/{{run_id}}/final.json",
        weights=f"{RESULTS}/runs/{{run_id}}/weights.safetensors",
    log:
        f"{LOGS}/train/{{run_id}}.log",
    conda:
        "../../environment.yml"
    threads: asked("train").threads * asked("train").processes
    resources:
        **needs("train"),
    params:
        preset=PRESET.name,
        command=in_processes(asked("train").processes),
    shell:
        "{params.command} train {wildcards.run_id} --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"
