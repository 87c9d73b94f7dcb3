rule train_decoder:
    input:
        ancient(TRACKING),
        code=stamp("decoders/{decoder}"),
    output:
        f"{RESULTS}/decoders/{{decoder}}/metrics.jsonl",
        f"{RESULTS}/decoders/{{decoder}}/final.json",
        [
            f"{RESULTS}/decoders/{{decoder}}/step{step}/{name}"
            for step in PRESET.decoder_steps
            for name in DECODER_FILES
        ],
    log:
        f"{LOGS}/train_decoder/{{decoder}}.log",
    conda:
        "../../environment.yml"
    threads: asked("train").threads
    resources:
        **needs("train", gpu=min(1, asked("train").gpu)),
    params:
        preset=PRESET.name,
    shell:
        "attngeo train-decoder {wildcards.decoder} --preset {params.preset} --stamp {input.code} --threads {threads} > {log} 2>&1"
